"""The result of the demo's rounds: mAP and CMC@1 over t, beside exact searches in memory, as a summary, a picture and a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import demo_models
from demo_data import Pictures
from rmvdb import metrics
from rmvdb.app import wiring
from rmvdb.learning import calibration
from rmvdb.types import Metric


@dataclass(frozen=True, kw_only=True)
class Point:
    """Quality at one moment, in percent."""

    t: float
    map: float
    cmc: float

    def rounded(self) -> list[float]:
        return [round(self.t, 4), round(self.map, 3), round(self.cmc, 3)]


class Report:
    """Reads what lies in the demo's folder once the upgrade has been cut over."""

    def __init__(self, folder: Path, pictures: Pictures) -> None:
        self.folder, self.pictures = folder, pictures
        self.first = len(pictures.labelled)  # the lowest id that quality is measured on
        self.relevant = pictures.queries.labels[:, None] == pictures.plain.labels[None, :]  # (Q, G)
        queries = [folder / "queries" / f"{number}.png" for number in range(len(pictures.queries))]
        photos = [folder / "photos" / f"{number}.png" for number in range(self.first + len(pictures.plain))]
        old, new = (demo_models.embedder(str(folder / f"{name}.safetensors")) for name in ("v1", "v2"))
        old_queries, old_photos, new_queries, new_photos = (
            model.embed(items) for model in (old, new) for items in (queries, photos)
        )
        measured = slice(self.first, None)
        self.d_old = _distances(old_queries, old_photos[measured])  # (Q, G)
        self.d_new = _distances(new_queries, new_photos[measured])
        self.d_final = _distances(*self._final(new_queries, new_photos[measured]))
        self.scales = [self._calibration(each[: self.first]) for each in (old_photos, new_photos)]

    def _final(self, *vectors: np.ndarray) -> list[np.ndarray]:
        """ρ∘φ_new, as the registry now has it."""
        found = wiring.load(self.folder)
        version = found.registry.plan("photos").legs[0].model
        return [found.loaded_models.apply_head(version, each) for each in vectors]

    def _calibration(self, labelled: np.ndarray) -> calibration.Calibration:
        """Learn from the labelled pictures how to make a model's distances comparable with another's."""
        labels = self.pictures.labelled.labels
        others = ~np.eye(len(labels), dtype=bool)
        return calibration.fit(_distances(labelled, labelled)[others], (labels[:, None] == labels[None, :])[others])

    def summary(self, tally: dict[str, Any], rounds: list[str], seconds: dict[str, float]) -> dict[str, Any]:
        """Everything that was measured; `rounds` are those while both collections were in service, in their order."""
        before, after = self.measured("before"), self.measured("after")
        new = self.point(1.0, self.d_new)
        curve = [self.measured(name) for name in rounds]
        plain = [self.measured(f"{name}-plain") for name in rounds]
        naive = [self.naive(name) for name in rounds]
        scaled = [self.naive(name, scaled=True) for name in rounds]
        curves = {"rm": curve, "without_rescoring": plain, "naive": naive, "naive_calibrated": scaled}
        areas = {name: _areas(points) for name, points in curves.items()}
        gains = {name: metrics.gain(area["mAP"], old=before.map, new=new.map) for name, area in areas.items()}
        return {
            "data": self.pictures.name,
            "records": len(self.pictures.labelled) + len(self.pictures.plain),
            "queries": len(self.pictures.queries),
            **tally,
            "unit": "percent",
            "M_old": round(before.map, 3),
            "M_0": round(curve[0].map, 3),
            "curve": [point.rounded() for point in curve],
            "without_rescoring": [point.rounded() for point in plain],
            "naive": [point.rounded() for point in naive],
            "naive_calibrated": [point.rounded() for point in scaled],
            "M_1": round(after.map, 3),
            "M_new": round(new.map, 3),
            "M_offline": round(self.point(1.0, self.d_final).map, 3),
            "CMC_old": round(before.cmc, 3),
            "CMC_new": round(new.cmc, 3),
            "CMC_offline": round(self.point(1.0, self.d_final).cmc, 3),
            "AUC": {name: {key: round(value, 3) for key, value in area.items()} for name, area in areas.items()},
            "gain": {name: round(value, 3) for name, value in gains.items()},
            "largest_fall": round(max(0.0, *(one.map - two.map for one, two in pairwise(curve))), 3),
            "seconds": seconds,
        }

    def measured(self, name: str) -> Point:
        """The answers of `client.search` in one round."""
        ids, new = self._round(name)
        place = np.full(self.d_old.shape, np.inf)  # (Q, G)
        for row, ranked in enumerate(ids):
            there = ranked >= self.first
            place[row, ranked[there] - self.first] = np.flatnonzero(there)
        return self.point(float(new.mean()), place)

    def naive(self, name: str, *, scaled: bool = False) -> Point:
        """Both models' own distances merged, as they are or calibrated, with the records re-embedded that were in that round."""
        ids, new = self._round(name)
        moved = np.zeros(self.d_old.shape, dtype=bool)  # (Q, G)
        for row, ranked in enumerate(ids):
            there = new[row] & (ranked >= self.first)
            moved[row, ranked[there] - self.first] = True
        d_old, d_new = (
            scale.apply(distance) if scaled else distance
            for scale, distance in zip(self.scales, (self.d_old, self.d_new), strict=True)
        )
        return self.point(float(new.mean()), np.where(moved, d_new, d_old))

    def point(self, t: float, distance: np.ndarray) -> Point:
        precision = metrics.mean(metrics.average_precision(distance, self.relevant))
        return Point(t=t, map=100 * precision, cmc=100 * metrics.mean(metrics.cmc(distance, self.relevant, k=1)))

    def _round(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        with np.load(self.folder / "rounds" / f"{name}.npz") as kept:
            return kept["ids"], kept["new"]


def _distances(queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    return metrics.distances(queries, gallery, metric=Metric.COSINE)


def _areas(points: list[Point]) -> dict[str, float]:
    ts = [point.t for point in points]
    return {
        "mAP": metrics.area(ts, [point.map for point in points]),
        "CMC@1": metrics.area(ts, [point.cmc for point in points]),
    }


def failures(summary: dict[str, Any]) -> list[str]:
    """A sentence for each thing that the demo promises and that was not so."""
    off = abs(summary["M_1"] - summary["M_offline"])
    broken = {f"{summary[name]} {what}": bool(summary[name]) for name, what in COUNTED.items()} | {
        f"M_0 is {summary['M_0']:.2f}, below M_old, {summary['M_old']:.2f}": summary["M_0"] < summary["M_old"],
        f"mAP fell by {summary['largest_fall']:.2f} points from one step to the next": summary["largest_fall"] > 0.5,
        f"M_1 is {off:.2f} points away from M_offline": off > 0.1,
        f"M_1 is {summary['M_1']:.2f}, below M_new, {summary['M_new']:.2f}": summary["M_1"] < summary["M_new"],
    }
    areas = {name: area["mAP"] for name, area in summary["AUC"].items()}
    # Rescoring may gain nothing where searches have no time for it, and the two curves are some searches apart.
    broken |= {
        f"the area under rmvdb's curve is below that of {name}": areas["rm"] < areas[name] - off
        for name, off in {"naive": 0.0, "naive_calibrated": 0.0, "without_rescoring": 0.5}.items()
    }
    return [sentence for sentence, so in broken.items() if so]


#: Counts that must be 0, and what they count.
COUNTED = {
    "failed": "searches failed",
    "missed": "records were missed by searches",
    "duplicates": "records were found twice",
    "writes_failed": "writes failed",
    "writes_unseen": "writes were not seen by their writer",
}


def table(summary: dict[str, Any], console: Console) -> None:
    """The summary for people."""
    counts = Table(title=f"{summary['data']}: {summary['records']} records, while the upgrade went on")
    for name in ("searches", *COUNTED, "writes"):
        counts.add_column(name.replace("_", "\n"), justify="right")
    counts.add_row(*(str(summary[name]) for name in ("searches", *COUNTED, "writes")))
    console.print(counts)
    names = {"curve": "rmvdb", "without_rescoring": "not rescored", "naive": "naive", "naive_calibrated": "naive calibrated"}
    quality = Table("t", *(f"{name}: mAP, CMC@1" for name in names.values()), title="measured meanwhile, in percent")
    for points in zip(*(summary[name] for name in names), strict=True):
        quality.add_row(f"{points[0][0]:.2f}", *(f"{point[1]:.1f}  {point[2]:.1f}" for point in points))
    console.print(quality)
    ends = Table("M_old", "M_0", "M_1", "M_offline", "M_new", "gain", "naive's", "seconds", title="mAP in percent")
    gains = (f"{100 * summary['gain'][name]:.0f} %" for name in ("rm", "naive_calibrated"))
    numbers = (f"{summary[name]:.2f}" for name in ("M_old", "M_0", "M_1", "M_offline", "M_new"))
    ends.add_row(*numbers, *gains, f"{summary['seconds']['total']:.0f}")
    console.print(ends)


#: Colours that differ in lightness too, so that the picture can be read without them.
RM, PLAIN, NAIVE, SCALED, OFFLINE, OLD = "#0b6e4f", "#6a994e", "#d1495b", "#edae49", "#30638e", "#8d99ae"
#: Key of a curve, its label, its colour, its marker.
CURVES = (
    ("naive", "naive merge", NAIVE, "s"),
    ("naive_calibrated", "naive merge, calibrated", SCALED, "^"),
    ("without_rescoring", "rmvdb without rescoring", PLAIN, "v"),
    ("curve", "rmvdb", RM, "o"),
)
#: The lines that do not change with t: the end of its two keys, its label, its colour, its line.
LEVELS = (
    ("offline", "offline re-index, ρ∘φ_new", OFFLINE, "--"),
    ("new", "new model alone, φ_new", OFFLINE, ":"),
    ("old", "status quo, φ_old", OLD, "-."),
)


def picture(summary: dict[str, Any], path: Path) -> None:
    """mAP and CMC@1 over t: as it was measured with rescoring and without, the naive merge, and either model alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for column, (axis, title, prefix) in enumerate(zip(axes, ("mAP", "CMC@1"), ("M", "CMC"), strict=True), start=1):
        for end, label, colour, line in LEVELS:
            axis.axhline(summary[f"{prefix}_{end}"], color=colour, linestyle=line, linewidth=1.4, label=label)
        for key, label, colour, marker in CURVES:
            ts, values = ([point[at] for point in summary[key]] for at in (0, column))
            axis.plot(
                ts, values, marker=marker, color=colour, markersize=5, linewidth=2.4 if key == "curve" else 1.4, label=label
            )
        axis.set(title=title, xlabel="t, share of the gallery re-embedded", ylabel=f"{title} in percent", xlim=(-0.02, 1.02))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(
        f"{summary['data']}: {summary['queries']} queries, {summary['records']} records, measured while the upgrade ran"
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write(summary: dict[str, Any], folder: Path) -> None:
    """summary.json and curve.png."""
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    picture(summary, folder / "curve.png")
