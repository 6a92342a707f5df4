"""Writes of one gallery: into each collection of the plan, so that no search shows stale content."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from rmvdb import errors
from rmvdb.canonical.vectors import unrankable
from rmvdb.items.digest import item_digest
from rmvdb.protocols import Permit, VectorStore
from rmvdb.registry.intents import refuse_unstorable
from rmvdb.serving import sketch
from rmvdb.serving.announced_writes import Writes
from rmvdb.serving.current_plan import CurrentPlan
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.serving.search import Reader
from rmvdb.text import counted
from rmvdb.types import Id, Item, Leg, Record, ServingPlan, Vectors

#: Selects, by the plan in force, the records to delete after all.
ConfirmIds = Callable[[ServingPlan, Sequence[Id]], Iterable[Id]]

#: Records in one announcement.
WRITE_BATCH = 500


class EngineKills:
    """The records of one write that killed the engine, in any collection. The other records are still written."""

    def __init__(self) -> None:
        self._first: errors.EngineKilled | None = None
        self._later: errors.EngineKilled | None = None
        self._calls = 0
        self._ids: set[Id] = set()

    def others(self, records: Sequence[Record]) -> list[Record]:
        """Return the records that are still to be written."""
        return [record for record in records if record.id not in self._ids]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Make one call of the store. Remember the records that kill the engine in it."""
        self._calls += 1
        try:
            yield
        except errors.EngineKilled as exc:
            if not exc.ids:
                raise
            self._ids.update(exc.ids)
            self._first, self._later = (exc, None) if self._calls == 1 else (self._first, self._later or exc)

    def raise_first(self) -> None:
        """Raise the EngineKilled of the first call if there was one, and no other. Its ids are in no collection.

        Raises:
            EngineKilled: without ids if a later call killed the engine: an earlier one has written the records.
        """
        if self._later:
            raise errors.EngineKilled(f"The write was made in part: {self._later}") from self._later
        if self._first:
            raise self._first


class Writer:
    """Writes one gallery by the plan in force. Safe to share between threads."""

    #: The calls by which a write changes something outside this process, in order. Tests kill it before and after each one.
    CALLS: ClassVar = {
        "upsert": ("registry.open_intents", "store.upsert new", "store.upsert old", "registry.close_intents"),
        "delete": ("registry.open_intents", "store.delete new", "store.delete old", "registry.close_intents"),
    }

    def __init__(
        self, *, store: VectorStore, loaded_models: LoadedModels, current_plan: CurrentPlan, writes: Writes, reader: Reader
    ) -> None:
        self._store, self._loaded_models, self._current_plan = store, loaded_models, current_plan
        self._writes, self._reader = writes, reader

    def upsert(self, records: Sequence[Record], items: Sequence[Item]) -> int:
        """Write records without vectors, each with its item. If an id comes twice, the last one counts. Return how many ids."""
        # Checks the ids and fields of all records before any record is written.
        checked = self._store.fields_of(self._current_plan.current().legs[0].collection, records)
        refuse_unstorable([record.id for record in checked])
        distinct = list({record.id: (record, item) for record, item in zip(checked, items, strict=True)}.values())
        for start in range(0, len(distinct), WRITE_BATCH):
            some = distinct[start : start + WRITE_BATCH]
            try:
                self._upsert([record for record, _ in some], [item for _, item in some])
            except errors.ItemError as exc:
                if exc.at is None:
                    raise
                written = f"; {counted(start, 'record')} before it {'is' if start == 1 else 'are'} written" if start else ""
                raise errors.ItemError(f"Record {some[exc.at][0].id!r} cannot be written: {exc.reason}{written}") from exc
        return len(distinct)

    def _upsert(self, records: Sequence[Record], items: Sequence[Item]) -> None:
        ids = [record.id for record in records]
        embedded: dict[str, Vectors] = {}
        digests = {id: item_digest(item) for id, item in zip(ids, items, strict=True)}  # before the item is read: it may change
        for leg in self._current_plan.current().write_targets:  # the slow part, before another writer must wait for this one
            _check_vectors(ids, self._loaded_models.stored(leg, items, embedded), leg)

        def rows(leg: Leg) -> list[Record]:
            vectors = self._loaded_models.stored(leg, items, embedded)
            return [replace(record, vector=vector) for record, vector in zip(records, vectors, strict=True)]

        sketches: dict[Id, bytes] = {}
        with self._writing("upsert", ids, sketches=sketches) as (plan, in_time):
            kills = EngineKills()
            # No other client and no worker writes these records until this write ends, and every earlier write has its answer. So
            # an older collection got its copies before this moment, and a later strong read would show no more of them. The
            # engine's clock passes the moment while the newest collection is written.
            moment = self._store.moment()
            newest, *older = plan.legs
            # Mirrors first: if the client is killed here, no search shows the write yet.
            for leg in _counted((*plan.mirrors, newest), in_time):
                with kills.noted():
                    self._store.upsert(leg.collection, kills.others(rows(leg)), permit=in_time)
            written = kills.others(rows(newest))
            sketches |= {row.id: sketch.of(row.vector, item=digests[row.id]) for row in written if row.vector is not None}
            # An older collection that still has the record must not show the replaced content. Only workers remove from it.
            if older:
                in_time()  # as `_counted` does
            for leg, stale in zip(older, self._reader.held(older, ids, after=moment), strict=True):
                if stale:
                    with kills.noted():
                        self._store.upsert(
                            leg.collection, [row for row in kills.others(rows(leg)) if row.id in stale], permit=in_time
                        )
            kills.raise_first()

    def delete(self, ids: Sequence[Id], confirm: ConfirmIds | None = None) -> list[Id]:
        """Remove records. With `confirm`, remove those that it selects once no other writer is at them. Return their ids."""
        refuse_unstorable(ids)
        parts = (ids[start : start + WRITE_BATCH] for start in range(0, len(ids), WRITE_BATCH))
        return [id for part in parts for id in self._delete(part, confirm)]

    def delete_matching(self, filter: str) -> int:
        """Remove the records that match. Return how many."""

        def matching(plan: ServingPlan, some: Sequence[Id]) -> Iterable[Id]:
            legs = (self._store.get(leg.collection, some, filter=filter, fields=()) for leg in reversed(plan.legs))
            return {record.id: None for records in legs for record in records}

        pages = self._reader.pages(filter, (), page=WRITE_BATCH)
        return sum(len(self.delete([record.id for record in page], matching)) for page in pages)

    def _delete(self, ids: Sequence[Id], confirm: ConfirmIds | None) -> list[Id]:
        going = list(ids)

        def only(plan: ServingPlan) -> list[Id]:  # since the ids were listed, another writer may have changed the records
            going[:] = confirm(plan, ids) if confirm else ids
            return going

        with self._writing("delete", ids, only=only if confirm else None) as (plan, in_time):
            for leg in _counted(plan.write_targets, in_time):
                self._store.delete(leg.collection, going, permit=in_time)
        return going

    @contextmanager
    def _writing(
        self,
        kind: str,
        ids: Sequence[Id],
        *,
        only: Callable[[ServingPlan], Sequence[Id]] | None = None,
        sketches: Mapping[Id, bytes] = MappingProxyType({}),
    ) -> Iterator[tuple[ServingPlan, Permit]]:
        self._current_plan.current()
        with ExitStack() as last, self._writes.announced(kind, ids, only=only, sketches=sketches) as (plan, in_time):
            if plan.epoch < self._current_plan.current().epoch:
                raise self._current_plan.gone_back(plan.epoch)
            if plan.epoch > self._current_plan.current().epoch:
                # Otherwise this client would search by the plan before, which may not have the collection that is written to.
                self._current_plan.refresh()
            # This runs after the intents are closed, because their deadline does not wait for the engine. It also runs if the
            # write fails, because some calls may have been made.
            last.callback(self._reader.own_writes.note)
            yield plan, in_time


def _counted(legs: Iterable[Leg], in_time: Permit) -> Iterator[Leg]:
    """Yield the legs, and count a call before each but the first.

    If the engine refuses a leg before the store asks for its permit, the write counts as made in part all the same.
    """
    for at, leg in enumerate(legs):
        if at:
            in_time()
        yield leg


def _check_vectors(ids: Sequence[Id], vectors: Vectors, leg: Leg) -> None:
    for at, why in unrankable(vectors, leg.metric).items():
        raise errors.Mismatch(f"Record {ids[at]!r} cannot be written: its vector for {leg.collection} {why}; correct its item")
