"""What the demo's rounds say: mAP and CMC@1 over t, beside exact searches in memory; the summary, the picture, the table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_models
import numpy as np
from demo_data import Pictures
from rmvdb import app, metrics
from rmvdb.types import Metric
from rich.console import Console
from rich.table import Table


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
        photos = [folder / "photos" / f"{self.first + number}.png" for number in range(len(pictures.plain))]
        old, new = (demo_models.embedder(str(folder / f"{name}.safetensors")) for name in ("v1", "v2"))
        new_queries, new_photos = new.embed(queries), new.embed(photos)
        self.d_old = _distances(old.embed(queries), old.embed(photos))  # (Q, G)
        self.d_new = _distances(new_queries, new_photos)
        self.d_final = _distances(*self._final(new_queries, new_photos))

    def _final(self, *vectors: np.ndarray) -> list[np.ndarray]:
        """ρ∘φ_new, as the registry now has it."""
        found = app.load(self.folder)
        version = found.registry.plan("photos").legs[0].model
        return [found.encoder.own(version, each) for each in vectors]

    def summary(self, tally: dict[str, Any], rounds: list[str], seconds: dict[str, float]) -> dict[str, Any]:
        """Everything that was measured; `rounds` are those while both collections were in service, in their order."""
        before, after = self.measured("before"), self.measured("after")
        new = self.point(1.0, self.d_new)
        curve = [self.measured(name) for name in rounds]
        naive = [self.naive(name) for name in rounds]
        areas = {name: _areas(points) for name, points in (("rm", curve), ("naive", naive))}
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
            "naive": [point.rounded() for point in naive],
            "M_1": round(after.map, 3),
            "M_new": round(new.map, 3),
            "M_offline": round(self.point(1.0, self.d_final).map, 3),
            "CMC_old": round(before.cmc, 3),
            "CMC_new": round(new.cmc, 3),
            "CMC_offline": round(self.point(1.0, self.d_final).cmc, 3),
            "AUC": {name: {key: round(value, 3) for key, value in area.items()} for name, area in areas.items()},
            "gain": {name: round(value, 3) for name, value in gains.items()},
            "largest_fall": round(max(0.0, *(one.map - two.map for one, two in zip(curve, curve[1:], strict=False))), 3),
            "seconds": seconds,
        }

    def measured(self, name: str) -> Point:
        """What `client.search` gave in one round."""
        ids, new = self._round(name)
        place = np.full(self.d_old.shape, np.inf)  # (Q, G)
        for row, ranked in enumerate(ids):
            there = ranked >= self.first
            place[row, ranked[there] - self.first] = np.flatnonzero(there)
        return self.point(float(new.mean()), place)

    def naive(self, name: str) -> Point:
        """Both models' own distances merged as they are, with the same records re-embedded as in that round."""
        ids, new = self._round(name)
        moved = np.zeros(self.d_old.shape, dtype=bool)  # (Q, G)
        for row, ranked in enumerate(ids):
            there = new[row] & (ranked >= self.first)
            moved[row, ranked[there] - self.first] = True
        return self.point(float(new.mean()), np.where(moved, self.d_new, self.d_old))

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
        "the area under RM's curve is below naive's": summary["AUC"]["rm"]["mAP"] < summary["AUC"]["naive"]["mAP"],
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
    counts = Table("searches", *COUNTED, "writes", title=f"{summary['data']}: {summary['records']} records, during the upgrade")
    counts.add_row(*(str(summary[name]) for name in ("searches", *COUNTED, "writes")))
    console.print(counts)
    quality = Table("t", "RM mAP", "naive mAP", "RM CMC@1", "naive CMC@1", title="measured while the upgrade ran, in percent")
    for rm, naive in zip(summary["curve"], summary["naive"], strict=True):
        quality.add_row(f"{rm[0]:.2f}", *(f"{value:.1f}" for value in (rm[1], naive[1], rm[2], naive[2])))
    console.print(quality)
    names = ("M_old", "M_0", "M_1", "M_offline", "M_new")
    ends = Table(*names, "gain of RM", "gain of naive", "seconds", title="mAP, in percent")
    gains = (f"{100 * summary['gain'][name]:.0f} %" for name in ("rm", "naive"))
    ends.add_row(*(f"{summary[name]:.2f}" for name in names), *gains, f"{summary['seconds']['total']:.0f}")
    console.print(ends)


#: Colours that differ in lightness too, so that the picture can be read without them.
RM, NAIVE, OFFLINE, OLD = "#0b6e4f", "#d1495b", "#30638e", "#8d99ae"


def picture(summary: dict[str, Any], path: Path) -> None:
    """mAP and CMC@1 over t: RM as it was measured, naive, and the two models alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    lines = (("mAP", 1, "M_old", "M_new", "M_offline"), ("CMC@1", 2, "CMC_old", "CMC_new", "CMC_offline"))
    for axis, (title, column, old, new, offline) in zip(axes, lines, strict=True):
        ts = [point[0] for point in summary["curve"]]
        axis.axhline(summary[offline], color=OFFLINE, linestyle="--", linewidth=1.3, label="offline re-index, ρ∘φ_new")
        axis.axhline(summary[new], color=OFFLINE, linestyle=":", linewidth=1.3, label="new model alone, φ_new")
        axis.axhline(summary[old], color=OLD, linestyle="-.", linewidth=1.3, label="status quo, φ_old")
        axis.plot(ts, [point[column] for point in summary["naive"]], "s-", color=NAIVE, markersize=4, label="naive merge")
        axis.plot(
            ts, [point[column] for point in summary["curve"]], "o-", color=RM, linewidth=2.2, markersize=5, label="rmvdb (RM)"
        )
        axis.set(title=title, xlabel="t, share of the gallery re-embedded", ylabel=f"{title} in percent", xlim=(-0.02, 1.02))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(
        f"{summary['data']}: {summary['queries']} queries, {summary['records']} records, measured while the upgrade ran"
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write(summary: dict[str, Any], folder: Path) -> None:
    """summary.json and curve.png."""
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    picture(summary, folder / "curve.png")
