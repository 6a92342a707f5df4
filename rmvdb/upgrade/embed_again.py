"""Compares stored vectors with the vectors that the model makes of the same items now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rmvdb.backfill.task import Task
from rmvdb.canonical.vectors import unrankable
from rmvdb.items.check import TOLERANCE, embed_checked
from rmvdb.items.sources import given, too_large
from rmvdb.protocols import Source
from rmvdb.registry.registry import Registry
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.types import Id, Item, Metric, Record
from rmvdb.upgrade.report import VerifyReport


class EmbedAgain:
    """Embeds items again. A roll back puts back old vectors, so that nothing is embedded for it."""

    def __init__(self, *, registry: Registry, loaded_models: LoadedModels, source: Source | None, batch: int) -> None:
        self._registry, self._loaded_models, self._source, self._batch = registry, loaded_models, source, batch

    def differing(
        self, task: Task, records: Sequence[Record], report: VerifyReport, *, only: Callable[[Id, Item], bool] = lambda *_: True
    ) -> dict[Id, float]:
        """Return the records whose vectors differ, with the cosine distance. Embed as many items at once as fit into memory.

        `only` chooses by id and item.

        Raises:
            ModelError: the model is not the registered one any more.
            SourceError: one item alone does not fit.
        """
        waiting = [list(records[at : at + self._batch]) for at in range(0, len(records), self._batch)]
        differing: dict[Id, float] = {}
        while waiting:
            part = waiting.pop()
            try:
                differing |= self._at_once(task, part, report, only)
            except MemoryError as exc:
                if len(part) == 1:
                    raise too_large(part[0].id) from exc
                self._batch = len(part) // 2
                waiting += [part[: len(part) // 2], part[len(part) // 2 :]]
        return differing

    def _at_once(
        self, task: Task, records: Sequence[Record], report: VerifyReport, only: Callable[[Id, Item], bool]
    ) -> dict[Id, float]:
        if not records or self._source is None or task.undoes is not None:
            return {}
        items = given(self._source, records)[0]
        there = [record for record in records if record.id in items and only(record.id, items[record.id])]
        if not there:
            return {}
        chain = self._loaded_models.chain(task.version)
        embedder = self._loaded_models.embedder(chain.embedder)
        raw, bad = embed_checked(embedder, [items[record.id] for record in there], chain.dim, confirm=True)
        for at, why in bad.items():  # an item that broke since proves nothing
            report.leave_out(there[at].id, why)
        there = [record for at, record in enumerate(there) if at not in bad]
        if not there:
            return {}
        embedded = self._loaded_models.apply_head(task.version, raw[[at for at in range(len(raw)) if at not in bad]])
        report.embedded_again += len(there)
        distances = {record.id: _cosine_distance(record.vector, own) for record, own in zip(there, embedded, strict=True)}
        differing = {id: distance for id, distance in distances.items() if not distance <= TOLERANCE}
        if differing:
            self._loaded_models.check(chain.embedder)  # the model may be another one by now, and no item is to blame
        return differing

    def rankable(self, task: Task, records: Sequence[Record], report: VerifyReport) -> list[Record]:
        """Return the records whose vectors a search can rank, and complain of the others.

        A roll back puts back the old vector, whatever it was.
        """
        vectors = [record.vector for record in records if record.vector is not None]
        if not vectors or task.undoes is not None:
            return list(records)
        odd = unrankable(np.stack(vectors), Metric(self._registry.version(task.version).metric))
        for at, why in odd.items():
            report.complain(f"record {records[at].id!r} has a vector that {why}, so that no search finds it; write it again")
        return [record for at, record in enumerate(records) if at not in odd]


def _cosine_distance(one: Any, other: Any) -> float:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    scale = float(np.linalg.norm(one) * np.linalg.norm(other))
    return 1.0 - float(one @ other) / scale if scale else float(not np.array_equal(one, other))
