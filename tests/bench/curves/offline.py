"""Whole curves of vectors alone, in a minute: what a plan chooses without rescoring, and what that is worth to the test queries.

    python -m tests.bench.curves.offline --data FOLDER --cases b,c,d --seeds 0,1,2

No engine, no command line: the plan's own choice is made on a sample of the gallery, and the whole gallery is then searched
exactly. The test queries report only. For each calibration the table says what the same transforms would be worth by it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rmvdb.learning.method import AsQueries, Fitted, Method, Pairs, TrainingSettings
from rmvdb.planning.curve import Calibrations, merged
from rmvdb.planning.excerpts import excerpt
from rmvdb.planning.held_out import HeldOutParts
from rmvdb.planning.part import Part, Queries
from rmvdb.planning.quality import Floats
from rmvdb.planning.trial import Trial
from rmvdb.types import Metric, Vectors
from tests.bench.curves.cases import CASES, Case, Sizes, Version
from tests.bench.curves.measure import area, largest_fall, quality

COSINE = {"old_metric": Metric.COSINE, "new_metric": Metric.COSINE}
ORDER = "random"
#: Items embedded at once.
CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Offline:
    """A case as vectors: its gallery, its queries, and the sample that a plan may look at."""

    case: Case
    #: By the old and by the new model, (G, d) and (Q, d).
    gallery: tuple[Vectors, Vectors]
    queries: tuple[Vectors, Vectors]
    #: The rows of the sample, and excerpts of their texts as queries.
    sample: np.ndarray
    excerpts: tuple[Vectors, Vectors] | None

    def trial(self, seed: int) -> Trial:
        """Split the sample as a plan does."""
        old, new = (vectors[self.sample] for vectors in self.gallery)
        asked = None if self.excerpts is None else AsQueries(old=self.excerpts[0], new=self.excerpts[1], excerpts=True)
        pairs = Pairs(old=old, new=new, as_queries=asked)
        order = {ORDER: np.random.default_rng(seed).random(len(pairs))}
        settings = TrainingSettings(seed=seed)
        return Trial(pairs, confidences=order, settings=settings, seed=seed, gallery=len(self.gallery[0]), seconds=60, **COSINE)

    def curve(self, fitted: Fitted, calibrations: Calibrations, seed: int) -> list[tuple[float, float]]:
        """Search the whole gallery for the test queries at each t, in random order."""
        old, new = self.gallery
        relevant = self.case.relevant
        asked = Queries(old=self.queries[0], new=self.queries[1], relevance=relevant, leave_out=np.zeros_like(relevant))
        order = np.random.default_rng(seed).random(len(old))
        part = Part(pairs=Pairs(old=old, new=new), confidence=order, queries=asked, **COSINE)
        ts = Sizes.ts
        found = merged(*part.distances(fitted, calibrations), part.order, None, ts)
        return [(t, self._quality(each)) for t, each in zip(ts, found, strict=True)]

    def _quality(self, distances: Floats) -> float:
        ranked = np.argsort(distances, axis=1, kind="stable")[:, : self.case.limit]
        return quality(ranked.tolist(), self.case.relevant, self.case.metric)


def load(name: str, seed: int, data: Path) -> Offline:
    """Embed a case, as far as its vectors are not kept. Every sample is 40 % of the gallery."""
    case = CASES[name](seed, Path(tempfile.mkdtemp(prefix="rmvdb-offline-")), data, Sizes())
    models = [_embedder(version) for version in (case.versions[0], case.versions[-1])]
    items = [each.get("item", each.get("text")) for each in case.records]
    rng = np.random.default_rng(100 + seed)
    sample = np.sort(rng.permutation(len(items))[: case.sample])
    asked = [excerpt(items[row], rng) for row in sample] if "text" in case.records[0] else None
    old, new = models
    return Offline(
        case=case,
        gallery=(_vectors(old.embed, items), _vectors(new.embed, items)),
        queries=(_vectors(_asking(old), case.queries), _vectors(_asking(new), case.queries)),
        sample=sample,
        excerpts=None if asked is None else (_vectors(_asking(old), asked), _vectors(_asking(new), asked)),
    )


def _embedder(version: Version) -> Any:
    module, name = version.embedder.split(":")
    return getattr(importlib.import_module(module), name)(**version.options)


def _asking(model: Any) -> Any:
    return getattr(model, "embed_queries", model.embed)


def _vectors(embed: Any, items: Sequence[Any]) -> Vectors:
    some = (items[start : start + CHUNK] for start in range(0, len(items), CHUNK))
    made = np.concatenate([embed(each) for each in some])
    unit: Vectors = (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)
    return unit


def rows(name: str, seed: int, data: Path, methods: Sequence[Method]) -> Iterator[dict[str, Any]]:
    """Yield for each method what its plan serves, and what each calibration would be worth."""
    loaded = load(name, seed, data)
    trial = loaded.trial(seed)
    parts: HeldOutParts = trial.parts(ORDER)
    naive = dict(loaded.curve(Fitted(), parts.check.uncalibrated, seed))
    old, new = naive[0.0], naive[1.0]
    for method in methods:
        candidate = trial.candidate(method)
        fitted = candidate.measured.fitted
        ways = {
            "as planned": candidate.measured.calibrations,
            "none": parts.check.uncalibrated,
            "one for all queries": parts.check.matched(fitted),
            "each query's own": parts.check.references(fitted, parts.train),
        }
        for way, calibrations in ways.items():
            points = loaded.curve(fitted, calibrations, seed)
            yield {
                "case": name,
                "seed": seed,
                "method": str(method),
                "calibration": way,
                "merit": candidate.merit,
                "M_0 - M_old": points[0][1] - old,
                "gain": (area(points) - old) / (new - old),
                "fall": largest_fall(points),
            }


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    """Print a table: medians over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("TEST_DATA", "data")))
    parser.add_argument("--cases", default="b,c,d")
    parser.add_argument("--methods", default="naive,centred,neighbours,blend")
    parser.add_argument("--seeds", type=_numbers, default=(0, 1, 2), help="(default: 0,1,2)")
    asked = parser.parse_args()
    methods = [Method(name) for name in asked.methods.split(",")]
    for name in asked.cases.split(","):
        found = [row for seed in asked.seeds for row in rows(name, seed, asked.data.absolute(), methods)]
        print(f"{name}: medians of the seeds {', '.join(map(str, asked.seeds))}", flush=True)
        for method, way in dict.fromkeys((row["method"], row["calibration"]) for row in found):
            mine = [row for row in found if (row["method"], row["calibration"]) == (method, way)]
            numbers = {key: np.median([row[key] for row in mine]) for key in ("merit", "M_0 - M_old", "gain", "fall")}
            words = "  ".join(f"{key} {value:+.3f}" for key, value in numbers.items())
            each = " ".join(f"{row['gain']:.2f}" for row in mine)
            print(f"  {method:11s} {way:20s} {words}  gains {each}", flush=True)


if __name__ == "__main__":
    main()
