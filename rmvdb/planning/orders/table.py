"""The backfill orders by name. Imports neither numpy nor torch, because `rmvdb --help` reads the names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from rmvdb.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from rmvdb.protocols import Classifier, Order
    from rmvdb.types import Metric, Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The facts that an order may use, besides the records of the old collection."""

    metric: Metric
    #: The old model's classifier.
    classifier: Classifier | None = None
    #: The scalar field with a record's class or identity.
    label_field: str | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSpec:
    """One order: how users read about it, when it is possible, and which file makes it."""

    name: str
    #: The confidence of a record, and what the order needs, as docs/choosing.md has them.
    confidence: str
    needs: str
    #: A file of this folder. Its `make(records, known)` learns from records of the old collection, with vectors and fields.
    module: str
    #: Whether the confidence of a record is made from its vector or fields. If not, only ids are read.
    reads_records: bool = True
    is_possible: Callable[[Known], bool] = lambda _: True
    #: The error if the order is not possible, with `{known}` to fill in.
    refusal: str = ""

    def refuse(self, known: Known) -> None:
        """Raise ConfigError if the order lacks what it needs."""
        if not self.is_possible(known):
            raise ConfigError(self.refusal.format(known=known))


#: If none is named, rmvdb takes the first that is possible.
ORDERS: Mapping[str, OrderSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            OrderSpec(
                name="classification-score",
                confidence="highest class probability by v1's own classifier",
                needs="`model add --classifier`",
                module="classification_score",
                is_possible=lambda known: known.classifier is not None,
                refusal="The order classification-score needs the old model's classifier; give one, or choose the order cluster",
            ),
            OrderSpec(
                name="centroid",
                confidence="cosine to the mean of its class",
                needs="`--labels`",
                module="centroid",
                is_possible=lambda known: known.label_field is not None,
                refusal="The order centroid needs the field of a record's class; name one, or choose the order cluster",
            ),
            OrderSpec(
                name="uncertainty",
                confidence="how far from the origin of hyperbolic space it is (HBCT's Eq. 10)",
                needs="v1 of metric `LORENTZ`",
                module="uncertainty",
                is_possible=lambda known: known.metric == "LORENTZ",
                refusal="The order uncertainty is of hyperbolic galleries, and this is one of {known.metric}; choose cluster",
            ),
            OrderSpec(
                name="cluster", confidence="cosine to the nearest of √n k-means centres", needs="nothing", module="cluster"
            ),
            OrderSpec(name="random", confidence="none", needs="nothing", module="random", reads_records=False),
        )
    }
)


def order_spec(name: str) -> OrderSpec:
    """Return the order of that name. Raises UnknownName."""
    if name not in ORDERS:
        raise UnknownName("order", name, ORDERS)
    return ORDERS[name]


def possible_orders(collections: Sequence[Known]) -> list[str]:
    """Return the names of the orders that all these collections can have, the preferred one first."""
    return [name for name, spec in ORDERS.items() if all(map(spec.is_possible, collections))]


def make_order(name: str, records: Iterable[Record], known: Known) -> Order:
    """Make the order of that name. `centroid` and `cluster` learn from `records` in one pass.

    Raises UnknownName for another name, ConfigError if the order lacks what it needs, PlanRefused if the records teach nothing.
    """
    spec = order_spec(name)
    spec.refuse(known)
    made: Order = importlib.import_module(f"{__package__}.{spec.module}").make(records, known)
    return made
