"""The curves of a comparison as a picture; the one room that imports matplotlib."""

from __future__ import annotations

import importlib.util
import itertools
import os
from pathlib import Path
from typing import Any

from rmvdb.errors import ConfigError, UsageError

#: Colours that differ in lightness too, and markers, so that the picture can be read without them.
COLOURS = ("#d1495b", "#edae49", "#8cb369", "#66a182", "#30638e", "#0b6e4f", "#555b6e", "#a5a58d", "#b298dc")
#: One more than there are colours, so that two curves never share both.
MARKERS = "s^vD<o>pxP"
#: The level curves, which do not change with t: label, line and colour of each.
LEVELS = {
    "old": ("old model alone", "-.", "#8d99ae"),
    "new": ("new model alone", ":", "#22223b"),
    "ideal": ("new model with ρ, offline", "--", "#22223b"),
}


def check(path: Path) -> None:
    """Raise ConfigError if matplotlib is missing, UsageError if the file cannot be written: before the long part."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("A picture needs matplotlib, which is not installed; run pip install 'rmvdb[plot]', or leave --png out")
    if not os.access(path.resolve().parent, os.X_OK) or not path.resolve().parent.is_dir():
        raise UsageError(f"The folder of {str(path)!r} does not exist; make it, or name another file with --png")


def draw(comparison: dict[str, Any], path: Path) -> None:
    """Draw a comparison (`Comparison.to_json`) into a PNG file: mAP and CMC@1 over t, each method with its best order.

    Raises UsageError if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    best = [row for row in comparison["rows"] if row["best"]]
    levels, curves = {row["name"]: row for row in best}, [row for row in best if row["name"] not in LEVELS]
    chosen = comparison["recommended"]["method"], comparison["recommended"]["switch"]
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
    for axis, (title, key) in zip(axes, (("mAP", "map"), ("CMC@1", "cmc")), strict=True):
        for name, (label, line, colour) in LEVELS.items():
            if name in levels:
                axis.axhline(100 * levels[name]["curve"][key][0], color=colour, linestyle=line, linewidth=1.4, label=label)
        for row, colour, marker in zip(curves, itertools.cycle(COLOURS), itertools.cycle(MARKERS)):
            axis.plot(
                row["curve"]["ts"],
                [100 * value for value in row["curve"][key]],
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=2.6 if (row["name"], row["switch"]) == chosen else 1.3,
                label=_label(row),
            )
        axis.set(title=title, xlabel="t, share of the gallery re-embedded", ylabel=f"{title} in percent", xlim=(-0.02, 1.02))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"{comparison['evaluated']} queries that nothing was fitted on; recommended: {comparison['recommended']['method']}"
    )
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as exc:
        raise UsageError(f"{str(path)!r} cannot be written: {exc.strerror}; name another file with --png") from exc
    finally:
        pyplot.close(figure)


def _label(row: dict[str, Any]) -> str:
    since = f" from t = {row['switch']:g}" if row["switch"] is not None else ""
    return f"{row['name']}{since} ({row['order']})"
