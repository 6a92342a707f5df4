"""The question that a plan answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rmvdb.items.queries import read_queries
from rmvdb.learning.method import Method
from rmvdb.planning.objective import Objective
from rmvdb.planning.orders.table import ORDERS
from rmvdb.types import Query


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The question that a plan answers. The same question has the same answer for a day, unless the gallery grows."""

    gallery: str
    from_version: str
    to_version: str
    #: The collections that the upgrade would empty, newest first.
    old: tuple[str, ...] = ()
    #: When the gallery was added: another one of that name may have been removed before, and had other records.
    added: float = 0.0
    #: How searches embed their queries for these collections now, and whether applications may rescore.
    served: tuple[str, ...] = ()
    rescores: bool = True
    #: `VersionRow.digest` of the new version, then of the versions in these collections.
    versions: tuple[str, ...] = ()
    #: None chooses among `choose.CANDIDATES` by the sample.
    method: Method | None = None
    #: None chooses among the orders that are possible by the sample.
    order: str | None = None
    #: The metric to choose by. None takes that of `objective.DEFAULT`.
    objective: Objective | None = None
    #: How many candidates of the old collections each search rescores. None chooses by the sample.
    rescore: int | None = None
    #: The scalar field that holds a record's class or identity.
    labels: str | None = None
    #: How many records to train and measure on.
    sample: int = 20_000
    #: Train with the paper's settings as printed, and merge distances as they are.
    paper: bool = False
    seed: int = 0
    #: Keep the original collection whole, and empty a copy of it.
    instant_rollback: bool = False
    #: The field with a record's side information, a list of numbers, which helps `fct` to lift it.
    side: str | None = None
    #: A file of queries for `read_queries`. Queries with answers choose and measure, the others train ψ.
    queries: str | None = None
    #: About how long it may take, in minutes. Embeddings that are made are kept for the next plan and for the backfill.
    minutes: float = 2.0

    @classmethod
    def of_upgrade(cls, values: Mapping[str, Any]) -> Question:
        """Return the question that a registered upgrade was planned for, perhaps by an earlier rmvdb.

        Options that are gone since are left out. If its order is gone, records are listed in the default order.
        """
        known = {name: value for name, value in values.items() if name in {field.name for field in fields(cls)}}
        return cls(**known | {"order": known["order"] if known["order"] in ORDERS else None})

    @property
    def key(self) -> str:
        """Return the name under which the answer is kept. A file of queries counts by its content, not by its name."""
        told = asdict(self)
        if self.queries is not None:
            told["queries"] = [(str(each.item), type(each.item).__name__, each.answers) for each in self.asked()]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:24]

    def asked(self) -> list[Query]:
        """Read the queries of the file, if there is one. Raises UsageError if the file has none."""
        return [] if self.queries is None else read_queries(Path(self.queries))
