"""The parts of a sample that training does not see: one to tune, calibrate and choose by, and one to measure on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rmvdb.errors import PlanRefused, UsageError
from rmvdb.learning import geometry
from rmvdb.learning.method import Fitted, Pairs
from rmvdb.planning import quality
from rmvdb.planning.curve import Calibrations, Course
from rmvdb.planning.objective import Objective
from rmvdb.planning.part import Part, Queries
from rmvdb.text import counted
from rmvdb.types import Metric, Vectors

#: With fewer queries nothing can be measured.
LEAST_QUERIES = 10
#: With fewer records or queries to choose by, the difference between methods is mostly chance.
LEAST_TO_CHOOSE = 40
#: Queries whose cosine distance is at most this are the same query: an item's vector differs a little from batch to batch.
SAME = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """The calibrations of a fitted method."""

    #: The calibrations to serve, fitted on the whole part to choose by.
    served: Calibrations
    #: The calibrations of each half, fitted on the other half. None if the part is too small.
    halves: tuple[Calibrations, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutParts:
    """The parts of a sample in one backfill order."""

    #: Training sees this part.
    train: Part
    #: This one tunes and calibrates, and chooses unless `choosers` do. `halves` are its halves.
    check: Part
    halves: tuple[Part, Part]
    #: This one measures.
    judge: Part
    #: The records of `judge` with other queries, to choose by. Empty if there are no such queries.
    choosers: tuple[Part, ...] = ()

    def with_log(self, check: Pairs, judge: Pairs) -> HeldOutParts:
        """Return the parts with logged queries in place of records. The right answers are the new model's nearest records.

        Each half of `check` has half of its queries.
        """
        every = np.arange(len(check))
        one, two = (half.asked_by(check.take(every[at::2])) for at, half in enumerate(self.halves))
        return replace(self, check=self.check.asked_by(check), halves=(one, two), judge=self.judge.asked_by(judge), choosers=())

    @classmethod
    def of(cls, train: Part, check: Part, judge: Part, asked: Sequence[Queries]) -> HeldOutParts:
        """Split the parts. Of the `asked` queries, the last set measures and the sets before it choose."""
        rows = np.arange(len(check.pairs))
        halves = check.take(rows[::2]), check.take(rows[1::2])
        if not asked:
            return cls(train=train, check=check, halves=halves, judge=judge)
        *choosers, measured = (replace(judge, queries=each) for each in asked)
        return cls(train=train, check=check, halves=halves, judge=measured, choosers=tuple(choosers))

    def unasked(self, logged: Pairs) -> Pairs | None:
        """Return the logged queries that these parts do not search for, or None if they search for all.

        Two queries are the same if their new vectors are.
        """
        metric = self.judge.new_metric
        asked = [part.query_set.new for part in (self.check, self.judge, *self.choosers)]
        fresh = np.flatnonzero(first_same(logged.new, np.concatenate(asked), metric) < 0)
        return logged.take(fresh) if len(fresh) else None

    def calibrated(self, fitted: Fitted, objective: Objective, *, calibrate: bool) -> Scales:
        """Return the calibrations that raise the course, which is the metric over t.

        Each is fitted on one half and must raise the course on the other half. If the metrics differ, distances cannot be
        compared without a calibration, so the best one is returned in any case. The course is measured without rescoring,
        because a search without time to rescore merges by these calibrations alone. The odds of relevance need labels: without
        them, the new model's neighbours would confirm themselves. Lifted vectors share a collection with embedded ones and are
        served as one leg, so nothing is calibrated.
        """
        raw = Scales(served=self.check.uncalibrated, halves=(self.check.uncalibrated,) * 2)
        if fitted.lift is not None or not (calibrate or self.check.mixed(fitted)):
            return raw
        found = [] if self.check.mixed(fitted) else [raw]
        for fit in self._calibrating(fitted):
            with contextlib.suppress(PlanRefused):  # too few pairs to calibrate on
                others = tuple(fit(other) for other in self.halves[::-1])
                found.append(Scales(served=fit(self.check), halves=others))
        if not found:
            return Scales(served=self.check.matched(fitted), halves=None)
        return max(found, key=lambda each: merit(self._of_halves(fitted, objective, each, 0)))

    def _calibrating(self, fitted: Fitted) -> Iterator[Callable[[Part], Calibrations]]:
        """Yield the functions that fit a calibration on a part."""
        # After a roll back an old leg may be searched alone, so legs of different metrics must not need each other's scale.
        if not self.check.mixed(fitted):
            yield lambda part: part.references(fitted, self.train)
        yield lambda part: part.matched(fitted)
        if self.check.pairs.labels is not None:
            yield lambda part: part.calibrations(fitted)

    def courses(self, fitted: Fitted, objective: Objective, scales: Scales, *, rescore: int = 0) -> tuple[Course, ...]:
        """Return the metric to choose by over t, one course for each set of queries. There is none if the pairs are too few."""
        if self.choosers:
            return tuple(each.course(objective, fitted, scales.served, rescore=rescore) for each in self.choosers)
        return self._of_halves(fitted, objective, scales, rescore)

    def _of_halves(self, fitted: Fitted, objective: Objective, scales: Scales, rescore: int) -> tuple[Course, ...]:
        pairs = zip(self.halves, scales.halves or (), strict=False)
        return tuple(half.course(objective, fitted, scale, rescore=rescore) for half, scale in pairs)


def parts_by_order(
    sample: Part,
    rows: Sequence[npt.NDArray[np.intp]],
    confidences: Mapping[str, npt.NDArray[np.floating]],
    seed: int,
) -> dict[str, HeldOutParts]:
    """Make the parts for each backfill order. `rows`: the rows to train on, to tune on and to measure on."""
    train, check, judge = (replace(sample, queries=None).take(each) for each in rows)
    asked = [] if sample.queries is None else _asked(sample.queries.among(rows[2]), seed)
    return {
        name: HeldOutParts.of(train, _in_order(check, keys[rows[1]]), _in_order(judge, keys[rows[2]]), asked)
        for name, keys in confidences.items()
    }


def _in_order(part: Part, confidence: npt.NDArray[np.floating]) -> Part:
    return replace(part, confidence=np.asarray(confidence, dtype=np.float64))


def _asked(queries: Queries, seed: int) -> list[Queries]:
    """Split the queries with an answer at random. One half chooses, the other measures.

    If they are so few that records choose better, all of them measure.
    """
    known = np.random.default_rng(seed).permutation(np.flatnonzero(queries.relevance.any(axis=1)))
    if len(known) < LEAST_QUERIES:
        few = counted(len(known), "query with an answer in the sample is", "queries with an answer in the sample are")
        raise UsageError(f"{few} too few to measure by; give {LEAST_QUERIES} or more, or leave --queries out")
    if len(known) < 2 * LEAST_TO_CHOOSE:
        return [queries.take(known)]
    return [queries.take(known[::2]), queries.take(known[1::2])]


def first_same(queries: Vectors, others: Vectors, metric: Metric) -> npt.NDArray[np.intp]:
    """Return for each query (n, d) the row of the first of the `others` (q, d) that is the same query, −1 if there is none."""
    here, new = geometry.comparable(others, metric), geometry.comparable(queries, metric)
    found = np.full(len(new), -1)
    for start in range(0, len(new), quality.CHUNK):
        same = geometry.distances(new[start : start + quality.CHUNK], here, metric=Metric.COSINE) <= SAME  # (c, q)
        found[start : start + quality.CHUNK] = np.where(same.any(axis=1), same.argmax(axis=1), -1)
    return found


def merit(courses: Sequence[Course]) -> float:
    """Return the area under the mean course, less its largest fall. A course that only rises is worth more than one that dips."""
    if not courses:
        return -math.inf
    means = np.mean([each.means for each in courses], axis=0).tolist()
    return quality.area(courses[0].ts, means) - quality.largest_fall(means)
