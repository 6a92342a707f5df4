"""The door for application code: search and write one gallery as if no upgrade were running."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, overload

import numpy as np

from rmvdb import errors
from rmvdb.canonical.arguments import names_of, whole
from rmvdb.canonical.ids import checked_ids, ids_of
from rmvdb.engines.filters import given
from rmvdb.protocols import VectorStore
from rmvdb.registry.codec import schema_from_json
from rmvdb.registry.mark import Owner
from rmvdb.registry.registry import Registry
from rmvdb.serving.announced_writes import Writes
from rmvdb.serving.current_plan import CurrentPlan
from rmvdb.serving.latency import Latency
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.serving.query_keeper import QueryKeeper
from rmvdb.serving.rescorer import Rescorer
from rmvdb.serving.search import Encode, Reader
from rmvdb.serving.writes import Writer
from rmvdb.types import Hit, Id, Item, Record, ServingPlan, Vectors

log = logging.getLogger(__name__)


class Client:
    """Search, read and write one gallery. Make one with `rmvdb.connect`. Safe to share between threads.

    A query is embedded once, or by both models during an upgrade whose plan says so. Its legs are searched at the same time, and
    their hits are merged by calibrated distance. During an upgrade every answer covers the whole gallery, and shows each record
    once.
    """

    CALLS: ClassVar = Writer.CALLS

    def __init__(
        self,
        gallery: str,
        *,
        registry: Registry,
        store: VectorStore,
        loaded_models: LoadedModels,
        engine_timeout: float = 10.0,
        consistency: Literal["Bounded", "Strong"] = "Bounded",
        item_field: str = "",
        keeper: QueryKeeper | None = None,
        closing: Callable[[], None] = lambda: None,
        rescorer: Rescorer | None = None,
    ) -> None:
        """`item_field`: the field that holds a record's item, if one does. `consistency`: the default of a search. `keeper`: gets
        the items of every search that was answered. `close` calls `closing` last, to close what was opened for this client.
        Without `rescorer`, no search is rescored."""
        self.gallery = gallery
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._store, self._loaded_models = store, loaded_models
        self._consistency, self._item_field, self._keeper, self._closing = consistency, item_field, keeper, closing
        collections = registry.collections(registry.gallery(gallery).id)
        #: The schema of one of its collections. All have the same type of ids.
        self._schema = schema_from_json(collections[0].schema)
        owner = Owner(registry, store)
        _unless_away(gallery, lambda: owner.expect(gallery))
        self._latency = Latency()
        search_params: dict[str, Mapping[str, object]] = {row.name: row.search for row in collections}
        self._current_plan = CurrentPlan(
            gallery,
            registry=registry,
            prepare=functools.partial(_prepare, registry, loaded_models, search_params),
            name=self.name,
            latency=self._latency,
            rescoring=rescorer.figures.latest if rescorer else lambda: None,
            expect_owned=lambda plan, trace: _unless_away(
                gallery, lambda: owner.expect_since(gallery, {leg.collection for leg in plan.legs}, trace)
            ),
        )
        self._reader = Reader(
            gallery,
            registry=registry,
            store=store,
            loaded_models=loaded_models,
            current_plan=self._current_plan,
            engine_timeout=engine_timeout,
            search_params=search_params,
            rescorer=rescorer,
        )
        self._writer = Writer(
            store=store,
            loaded_models=loaded_models,
            current_plan=self._current_plan,
            writes=Writes(gallery, registry=registry, name=self.name, engine_timeout=engine_timeout),
            reader=self._reader,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave, so that the next change of epoch need not wait for this client."""
        if self._current_plan.forked:
            return  # the connections and threads belong to the process that forked this one
        self._current_plan.close()
        self._reader.close()
        if self._keeper is not None:
            self._keeper.close()
        self._closing()

    @property
    def plan(self) -> ServingPlan:
        """The serving plan in force."""
        return self._current_plan.current()

    # --- search -------------------------------------------------------------------------------------------------------

    @overload
    def search(
        self,
        item: list[Item],
        *,
        vector: Any = ...,
        model: str | None = ...,
        limit: int = ...,
        offset: int = ...,
        filter: str | None = ...,
        output_fields: Sequence[str] = ...,
        consistency: Literal["", "Bounded", "Strong"] = ...,
        rescore: int | None = ...,
    ) -> list[list[Hit]]: ...
    @overload
    def search(
        self,
        item: Item = ...,
        *,
        vector: Any = ...,
        model: str | None = ...,
        limit: int = ...,
        offset: int = ...,
        filter: str | None = ...,
        output_fields: Sequence[str] = ...,
        consistency: Literal["", "Bounded", "Strong"] = ...,
        rescore: int | None = ...,
    ) -> list[Hit]: ...

    def search(
        self,
        item: Item = None,
        *,
        vector: Any = None,
        model: str | None = None,
        limit: int = 10,
        offset: int = 0,
        filter: str | None = "",
        output_fields: Sequence[str] = (),
        consistency: Literal["", "Bounded", "Strong"] = "",
        rescore: int | None = None,
    ) -> list[Hit] | list[list[Hit]]:
        """Return the nearest records of an item, nearest first. A list of items gives a list of answers.

        `vector` with `model` searches with one vector (dim,) or several (n, dim) instead. `output_fields=["*"]` returns every
        field. `consistency="Strong"` shows every write that returned before the search. With "Bounded", this client's own writes
        show at once, and other clients' writes within the plan's staleness. The default is the client's own setting.

        `filter` is a Milvus expression. `offset` leaves out that many hits. Records of equal distance have no fixed order, so
        pages can skip or repeat one. Ask for a longer list and cut it instead.

        During an upgrade, `rescore` is how many of the best records that are not re-embedded yet the new model embeds for each
        query, to rank them by their true distance. The default is what the upgrade's plan says. 0 turns it off.

        Raises:
            UsageError: the arguments do not fit.
            FilterError: rmvdb cannot understand the filter.
            EngineError: the engine refuses the search, or is too slow.
            StalePlan: the registry does not answer, so this client cannot search safely.
        """
        limit, offset = whole("limit", limit, least=1), whole("offset", offset, least=0)
        encode, several = self._question(item, vector, model)
        fields = names_of(output_fields)
        if (level := consistency or self._consistency) not in ("Bounded", "Strong"):
            raise errors.UsageError(f'consistency is "Bounded" or "Strong", not {level!r}')
        most = None if rescore is None else whole("rescore", rescore, least=0)
        with self._latency.measured():
            answers = self._reader.search(
                encode, limit=limit, offset=offset, filter=filter, fields=fields, strong=level == "Strong", rescore=most
            )
        if self._keeper is not None and vector is None:
            self._keeper.offer(item if isinstance(item, list) else [item])
        return answers if several else answers[0]

    def _question(self, item: Item, vector: Any, model: str | None) -> tuple[Encode, bool]:
        if (item is None) == (vector is None):
            raise errors.UsageError("search takes an item, a list of items, or vector= with model=; give one of them")
        if vector is None:
            items = item if isinstance(item, list) else [item]
            embedded: dict[str, Vectors] = {}  # so that a repetition embeds no item again
            return lambda plan: self._loaded_models.queries(plan, items, embedded), isinstance(item, list)
        if model is None:
            raise errors.UsageError('A raw vector names the model that made it: search(vector=…, model="v2")')
        try:
            with np.errstate(over="ignore"):  # too large a value becomes infinity, and is refused later
                vectors = np.asarray(vector, dtype=np.float32)
        except (TypeError, ValueError, OverflowError, RuntimeError) as exc:  # RuntimeError: a tensor that needs gradients
            raise errors.Mismatch(f"vector= takes numbers, (dim,) or (n, dim): {exc}") from exc
        rows = np.atleast_2d(vectors)
        return lambda plan: self._loaded_models.vectors(plan, rows, model), vectors.ndim == 2

    # --- read ---------------------------------------------------------------------------------------------------------

    def get(self, ids: Id | Iterable[Id], *, output_fields: Sequence[str] = ("*",)) -> list[Record]:
        """Return the records of these ids that exist, each once, in the order of the ids, as the last write left them."""
        wanted = self._ids(ids)
        records = self._reader.get(wanted, names_of(output_fields))
        return [records[id] for id in wanted if id in records]

    def _ids(self, ids: Id | Iterable[Id]) -> list[Id]:
        return checked_ids(ids_of(ids), self._schema)

    def query(
        self, filter: str | None = "", *, limit: int = 100, offset: int = 0, output_fields: Sequence[str] = ("*",)
    ) -> list[Record]:
        """Return records that match a filter, in ascending id order."""
        limit, offset = whole("limit", limit, least=0), whole("offset", offset, least=0)
        fields = names_of(output_fields)
        records: list[Record] = []
        for page in self._reader.pages(filter, fields, page=min(limit + offset, 1000) or 1):
            records += page
            if len(records) >= limit + offset:
                break
        return records[offset : offset + limit]

    def count(self, filter: str | None = "") -> int:
        """Return how many records match. A record in several collections counts once."""
        return self._reader.count(filter)

    # --- write --------------------------------------------------------------------------------------------------------

    def upsert(self, records: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> int:
        """Write a record `{"id": …, "item": …, field: value, …}`, or several. They replace records of the same ids.

        rmvdb embeds the item. If the gallery's source is a field (`--source field:text`), that field is the item, and you may
        leave out "item" or the field. Return how many ids were written. After that, every search of this client shows the new
        records and nothing that they replaced.
        """
        pairs = list(_each(records, self._item_field))
        return self._writer.upsert([record for record, _ in pairs], [item for _, item in pairs])

    def delete(self, ids: Id | Iterable[Id] | None = None, *, filter: str | None = "") -> int:
        """Remove records by id, or all that match a filter. Return how many ids you gave, or how many records matched."""
        filter = given(filter)
        if (ids is None) == (not filter):
            raise errors.UsageError("delete takes ids, or filter=…; give one of them")
        return len(self._writer.delete(self._ids(ids))) if ids is not None else self._writer.delete_matching(filter)

    def expect_usable(self) -> None:
        """Raise UsageError if this client is closed, or belongs to the process that forked this one."""
        self._current_plan.expect_usable()

    def delete_those(self, ids: Sequence[Id], confirm: Callable[[Sequence[Id]], Iterable[Id]]) -> list[Id]:
        """Remove the records that `confirm` selects once no other writer is at them. Return their ids."""
        return self._writer.delete(self._ids(ids), lambda _, some: confirm(some))


def _each(records: Mapping[str, Any] | Iterable[Mapping[str, Any]], item_field: str) -> Iterator[tuple[Record, Item]]:
    """Yield the caller's records as records without vectors, each with its item."""
    if not isinstance(records, Iterable):
        raise errors.UsageError(f"upsert takes a record or a list of records, each a dictionary, not a {type(records).__name__}")
    for record in [records] if isinstance(records, Mapping) else records:
        if not isinstance(record, Mapping) or "id" not in record:
            has = ", ".join(map(str, record)) if isinstance(record, Mapping) else f"a {type(record).__name__}"
            raise errors.UsageError(f"A record to write needs an id and an item; this one has: {has or 'nothing'}")
        fields = {name: value for name, value in record.items() if name not in ("id", "item")}
        item = _item(record, item_field)
        if item_field and fields.get(item_field) is None:
            fields[item_field] = item  # else the backfill would find no item to embed again
        yield Record(id=record["id"], fields=fields), item


def _item(record: Mapping[str, Any], field: str) -> Item:
    """Return the item of a caller's record: its "item", or the field that holds it."""
    stored = record.get(field) if field else None
    if "item" not in record:
        if stored is None:
            needs = f"an item, or the field {field!r} that holds it" if field else "an item"
            raise errors.UsageError(f"A record to write needs an id and {needs}; this one has: {', '.join(map(str, record))}")
        return stored
    if stored is not None and not _same(stored, record["item"]):
        raise errors.UsageError(
            f"Record {record['id']!r} has one item and another {field!r}, which holds the items of this gallery; leave item out"
        )
    return record["item"]


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (ValueError, RuntimeError):  # arrays and tensors
        with contextlib.suppress(RuntimeError):  # a tensor that needs gradients is no array
            return np.array_equal(one, other)
        return False


def _prepare(
    registry: Registry, loaded_models: LoadedModels, search_params: dict[str, Mapping[str, object]], plan: ServingPlan
) -> None:
    """Load what searches by this plan need, so that the first one does not wait for the registry."""
    loaded_models.prepare(plan)
    for leg in plan.legs:
        if leg.collection not in search_params:
            search_params[leg.collection] = registry.collection(leg.collection).search


def _unless_away(gallery: str, expect: Callable[[], None]) -> None:
    """Call `expect`. It raises NotOwner if another registry owns the gallery, or if this one has gone back. Do nothing if the
    engine is away."""
    try:
        expect()
    except errors.EngineError as exc:
        log.info("rmvdb could not check who owns the collections of %s: %s", gallery, exc)
