"""A picture that cannot be drawn is refused before the work, not after it."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rmvdb.cli import plot
from rmvdb.errors import ConfigError, UsageError
from rmvdb.learning.method import Method


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install 'rmvdb\[plot\]'"):
        plot.check(tmp_path / "curves.png")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    plot.check(tmp_path / "curves.png")
    with pytest.raises(UsageError, match="does not exist; make it"):
        plot.check(tmp_path / "nowhere" / "curves.png")


def row(name: str, order: str | None = "random", switch: float | None = None, height: float = 0.5) -> dict[str, Any]:
    ts = [i / 10 for i in range(11)]
    return {"name": name, "order": order, "switch": switch, "best": True, "curve": {"ts": ts, "map": [height] * 11, "cmc": ts}}


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    found = {"rows": [row("naive")], "evaluated": 9, "recommended": {"method": "naive", "switch": None}}
    with pytest.raises(UsageError, match="cannot be written: Is a directory; name another file with --png"):
        plot.draw(found, tmp_path)


def test_every_curve_is_drawn_and_differs_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot

    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    names, scheduled = [*map(str, Method)], ("cl-s", "mcl", "rm", "rqt")
    schedules = [row(name, switch=0.6, height=0.7) for name in scheduled]
    rows = [row("old", None), row("new", None), *map(row, names), *schedules]
    plot.draw({"rows": rows, "evaluated": 9, "recommended": {"method": "rqt", "switch": 0.6}}, tmp_path / "curves.png")
    monkeypatch.undo()
    (figure,) = figures
    lines = [line for line in figure.axes[0].lines if not line.get_label().endswith("alone")]
    labels = [line.get_label() for line in lines]
    assert labels == [*(f"{name} (random)" for name in names), *(f"{name} from t = 0.6 (random)" for name in scheduled)]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(lines) == 17
    assert [line.get_label() for line in lines if line.get_linewidth() > 2] == ["rqt from t = 0.6 (random)"]
    assert set(lines[-1].get_ydata()) == {70.0}
    pyplot.close(figure)
