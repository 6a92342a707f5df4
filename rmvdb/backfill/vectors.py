"""The new vectors of a batch's records: from the archive for a roll back, else from their items."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from rmvdb import errors
from rmvdb.backfill.records import BatchRecords, vector_of
from rmvdb.backfill.task import Task
from rmvdb.canonical.vectors import unrankable
from rmvdb.items.check import KNOWN_GOOD, TOLERANCE, distances, embed_checked
from rmvdb.items.digest import item_digest
from rmvdb.items.sources import given, too_large
from rmvdb.protocols import Source, VectorStore
from rmvdb.registry.codec import key
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import BatchRow
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.storage.archive import Archive, ArchiveFile, Reading
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.text import counted
from rmvdb.types import Id, Metric, Record, Vectors

#: Seconds between two comparisons of the model with its registration.
CHECK_EVERY = 60.0
#: How far ψ's vector may lie from itself, made again, as a share of its length.
_ALIKE = 1e-3
#: Why a record is set aside, by id.
Reasons = dict[Id, str]


class NewVectors(BatchRecords):
    """Makes the vectors that a batch writes, and says why a record gets none."""

    def __init__(
        self,
        *,
        registry: Registry,
        store: VectorStore,
        loaded_models: LoadedModels,
        source: Source | None,
        archive: Archive,
        cache: EmbeddingCache | None = None,
    ) -> None:
        super().__init__(registry=registry, store=store, archive=archive)
        self._loaded_models, self._source, self._cache = loaded_models, source, cache
        self._one_at_a_time = threading.Lock()
        self._metrics: dict[str, Metric] = {}

    def _embed(
        self, task: Task, batch: BatchRow, old: Sequence[Record], stand_ins: Set[Id]
    ) -> tuple[dict[str, list[Record]], Reasons]:
        """Return the records with their new vectors, by target collection, and the reasons of those without one."""
        made = self._from_archive(task, batch, [record for record in old if record.id not in stand_ins])
        ready = {record.id for records in made.values() for record in records}
        rest = [record for record in old if record.id not in ready]
        embedded, reasons = self._from_items(task, rest, batch.origin)
        made[task.new[0]] = made.get(task.new[0], []) + _with_vectors(rest, embedded)
        return made, reasons

    def _from_archive(self, task: Task, batch: BatchRow, old: Sequence[Record]) -> dict[str, list[Record]]:
        """Return, for a roll back, the records as they were, in their former collections, except for records written since."""
        written = self._written(task, [record.id for record in old])
        wanted = {record.id: record for record in old if key(record.id) not in written}
        archived = {
            collection: [each for each in readings if each.record.id in wanted]
            for collection, readings in self._readings(batch.origin).items()
        }
        newest = archived.get(task.new[0], [])
        of_other_items = self._of_other_items(task, {each.record.id: wanted[each.record.id] for each in newest}, newest)
        return {
            collection: [
                replace(again, vector=of_other_items.get(again.id, again.vector))
                for again in (each.put_back_for(wanted[each.record.id]) for each in readings)
            ]
            for collection, readings in archived.items()
        }

    def _of_other_items(self, task: Task, now: Mapping[Id, Record], archived: Sequence[Reading]) -> dict[Id, Vectors]:
        """Return the vectors of records whose items are no longer those of their archived vectors.

        A client wrote these records where they had moved, and the registry has forgotten it: it went back, or was rebuilt. If the
        embedder or the item is missing, the archived vector has to do. If the source is away, the batch waits for it.
        """
        written = [now[each.record.id] for each in archived if each.has_another_vector(now[each.record.id])]
        if not written or self._source is None:
            return {}
        try:
            self._loaded_models.embedder(self._loaded_models.chain(task.version).embedder)
            made, _ = self._from_items(task, written, None)
        except errors.SourceUnavailable:
            raise
        except (errors.ModelError, errors.SourceError) as exc:
            if isinstance(exc.__cause__, MemoryError):
                raise
            return {}
        before = {each.record.id: vector_of(each.record) for each in archived}
        # The item may be the same: another worker may have written the vector, which differs by rounding.
        return {id: vector for id, vector in made.items() if distances(before[id][None], vector[None])[0] > TOLERANCE}

    def _stand_ins(self, task: Task, batch: BatchRow, old: Sequence[Record]) -> set[Id]:
        """Return, for a roll back, the records that would keep a vector that ψ made. A client wrote them during the upgrade.

        The registry may have forgotten such a write: it went back, or was rebuilt. So the vectors are compared.
        """
        if task.undoes is None or not task.fallback_transforms:
            return set()
        archived = (each.record for each in self._readings(batch.origin).get(task.new[0], []))
        before = {record.id: record.vector for record in archived}
        rest = [record.id for record in old if record.id not in before]
        before |= {each.id: each.vector for each in self._store.get(task.new[0], rest, fields=(), vector=True)} if rest else {}
        both = [
            (record.id, record.vector, there)
            for record in old
            if record.vector is not None and (there := before.get(record.id)) is not None
        ]
        if not both:
            return set()
        made = self._loaded_models.apply(task.fallback_transforms, np.stack([now for _, now, _ in both]))  # (n, d_old)
        there = np.stack([vector for _, _, vector in both])
        alike = np.linalg.norm(made - there, axis=1) <= _ALIKE * np.linalg.norm(there, axis=1)
        return {id for (id, _, _), is_alike in zip(both, alike, strict=True) if is_alike}

    def _from_items(
        self, task: Task, old: Sequence[Record], origin: Mapping[str, Any] | None
    ) -> tuple[dict[Id, Vectors], Reasons]:
        """Embed the records' items, as many at once as fit into memory. Raises SourceError if one item alone does not."""
        try:
            return self._at_once(task, old, origin)
        except MemoryError as exc:
            if len(old) == 1:
                raise too_large(old[0].id) from exc
        halves = [self._from_items(task, part, origin) for part in (old[: len(old) // 2], old[len(old) // 2 :])]
        return halves[0][0] | halves[1][0], halves[0][1] | halves[1][1]

    def _at_once(self, task: Task, old: Sequence[Record], origin: Mapping[str, Any] | None) -> tuple[dict[Id, Vectors], Reasons]:
        if not old:
            return {}, {}
        chain = self._loaded_models.chain(task.version)
        try:
            embedder = self._loaded_models.embedder(chain.embedder)
        except errors.ModelError:
            if not task.fallback_transforms:
                raise
            return self._transformed(task, old, origin), {}
        metric = self._metric(task.version)
        items, reasons = self._items(task, old)
        raw = self._cached(task, [record for record in old if record.id in items], items)
        known = tuple(record for record in old if record.id in raw)
        items = {id: item for id, item in items.items() if id not in raw}
        if items:
            known_good = functools.cache(functools.partial(self._known_good, task, known))
            with self._one_at_a_time:  # the embedder is the bottleneck: it gets whole batches, one after the other
                self._loaded_models.check(chain.embedder, every=CHECK_EVERY)
                vectors, bad = embed_checked(
                    embedder, list(items.values()), chain.dim, metric=metric, known_good=known_good, confirm=True
                )
            ids = list(items)
            reasons |= {ids[at]: why for at, why in bad.items()}
            raw |= {id: vectors[at] for at, id in enumerate(ids) if at not in bad}
        return self._with_head(task, raw, reasons, metric), reasons

    def _metric(self, version: str) -> Metric:
        """Return the metric of a model version, which never changes."""
        if version not in self._metrics:
            self._metrics[version] = Metric(self._registry.version(version).metric)
        return self._metrics[version]

    def _with_head(self, task: Task, raw: Mapping[Id, Vectors], reasons: Reasons, metric: Metric) -> dict[Id, Vectors]:
        """Apply ρ, and add to `reasons` the records whose vector cannot be ranked."""
        embedded = np.stack(list(raw.values())) if raw else np.empty((0, 0), np.float32)
        made = self._loaded_models.apply_head(task.version, embedded) if raw else embedded
        odd = unrankable(made, metric) | unrankable(embedded, metric)  # ρ makes a vector with a direction of one without
        of = dict(zip(raw, made, strict=True))
        reasons |= {id: f"its vector {odd[at]}" for at, id in enumerate(of) if at in odd}
        return {id: vector for id, vector in of.items() if id not in reasons}

    def _transformed(self, task: Task, old: Sequence[Record], origin: Mapping[str, Any] | None) -> dict[Id, Vectors]:
        """Transform the old vectors. Raises ArtifactError if a file of a roll back's own vectors is missing or altered.

        Otherwise ψ's vectors would replace those for good.
        """
        for file in (origin or {}).values():
            self._archive.ids(ArchiveFile(**file))
        vectors = np.stack([record.vector for record in old if record.vector is not None])
        ids = [record.id for record in old]
        return dict(zip(ids, self._loaded_models.apply(task.fallback_transforms, vectors), strict=True))

    def _cached(self, task: Task, old: Sequence[Record], items: Mapping[Id, Any]) -> dict[Id, Vectors]:
        if self._cache is None or not (known := self._cache.knows(record.id for record in old)):
            return {}
        if task.cache_vectors_from:
            old = self._store.get(task.cache_vectors_from, list(known), fields=(), vector=True)
        old = [record for record in old if record.id in known]
        ids = [record.id for record in old]
        return self._cache.get(ids, [vector_of(record) for record in old], [item_digest(items[id]) for id in ids])

    def _known_good(self, task: Task, known: Sequence[Record]) -> list[Any]:
        """Return items of records that were embedded before, if any: they tell bad records from a broken model."""
        records = known[:KNOWN_GOOD] or self._embedded_before(task)
        return list(given(self._source, records)[0].values()) if self._source and records else []

    def _embedded_before(self, task: Task) -> list[Record]:
        """Return records that were embedded before, if any: they tell bad records from a broken source."""
        return [*next(self._store.scan(task.new[0], fields=None, page=KNOWN_GOOD), []), *self._sampled(task)]

    def _sampled(self, task: Task) -> list[Record]:
        """Return some records that were embedded for the plan: the new collection may still be empty."""
        ids = self._cache.some(KNOWN_GOOD) if self._cache else []
        return [record for records in self._read(task, ids).values() for record in records]

    def _items(self, task: Task, records: Sequence[Record]) -> tuple[dict[Id, Any], Reasons]:
        if not records:
            return {}, {}
        if self._source is None:
            raise errors.SourceError(
                "The gallery has no source of items to re-embed; give it one: rmvdb gallery source NAME SPEC"
            )
        items, failed = given(self._source, records, known_good=functools.partial(self._embedded_before, task))
        missing = [record.id for record in records if record.id not in items and record.id not in failed]
        if len(missing) == len(records) > 1 and not self._known_good(task, ()):
            raise errors.SourceError(
                f"The source has no item for any of {counted(len(records), 'record')}, such as {missing[0]!r}. "
                "Repair the source (rmvdb gallery show names it), then run the same command again"
            )
        return items, failed | dict.fromkeys(missing, "the source has no item of this id")


def _with_vectors(records: Sequence[Record], vectors: Mapping[Id, Vectors]) -> list[Record]:
    return [Record(id=each.id, vector=vectors[each.id], fields=each.fields) for each in records if each.id in vectors]
