"""The documentation's figures of the papers' tables are those of `results`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples.paper_tables import report

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "research" / "paper-tables.md").read_text()
#: Pages that tell Gains in their text.
TEXT = f"{PAGE} {(ROOT / 'docs' / 'choosing.md').read_text()}"
#: Which table the page means by its first cell; the longest beginning that fits.
TABLES = {
    "CIFAR-100, 50 → 100 classes": "cifar100-extended-class",
    "CIFAR-100, 50 → 100 classes, a larger new model": "cifar100-extended-class-wider",
    "Omniglot": "omniglot-open-identities",
    "CIFAR-100, no class in common": "cifar100-open-class",
}
#: The sentence beside a table, with the Gain and its spread in place of a method's name.
SAID = [
    ("cifar100-extended-class-wider", "`rm` gains {rm} %"),
    ("cifar100-orders", "`rm` gains {rm, random} % in random order, {rm, cluster} by cluster"),
    ("cifar100-orders", "{rm, classification-score} by classification score and {rm, centroid} by centroid"),
    ("cifar100-ablation", "| with a regression of weight 1 | {rm} % |"),
    (
        "cifar100-ablation",
        "| no regression | {rm: no pull} | | a regression of weight 3 | {rm: pull 3} | | no mining | {rm: no mining} |",
    ),
    (
        "cifar100-ablation",
        "| temperature 1 | {rm: temperature 1} | | no residual | {rm: no residual} | | no calibration | {rm: no calibration} |",
    ),
    (
        "cifar100-ablation",
        "| one block | {rm: 1 block} | | three blocks | {rm: 3 blocks} | | 750 pairs | {rm: 750 pairs} | "
        "| as printed in the paper | {rm, as printed} |",
    ),
    ("cifar100-ablation", "`cl-s` is at {cl-s}, and at {cl-s, with ρ} with a ρ that is trained by the same loss"),
    ("cifar100-ablation", "`mcl` without a regression has more Gain ({mcl, no labels: no pull} against {mcl, no labels})"),
]


def rows(setting: str, folder: str = ".") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "results" / folder / f"{setting}.json").read_text())["rows"]
    return found


def line(row: dict[str, Any], setting: str, *, published: bool) -> list[str]:
    """Return a row as the page has it: without flips, its mAP in one cell, of the published numbers the Gain alone."""
    (cells,) = report.CELLS["backfill"](row, setting)
    *shown, _, start, half, end, first, _, gain = cells
    return [*shown, f"{start} {half} {end}", first, *([gain] if published else [])]


def plain(text: str) -> str:
    return text.replace("**", "").replace("−", "-")


def test_every_cell_of_the_pages_tables_is_its_results() -> None:
    block = PAGE.split("<!-- figures:paper-tables: from results/*.json -->\n")[1].split("<!-- /figures:paper-tables -->")[0]
    settings = []
    for table in block.strip().split("\n\n"):
        head, _, *found = [[cell.strip() for cell in plain(each)[1:-1].split("|")] for each in table.splitlines()]
        setting = TABLES[max((name for name in TABLES if head[0].startswith(name)), key=len)]
        wanted = [line(row, setting, published=head[-1] == "published Gain") for row in rows(setting)]
        assert found == wanted, setting
        settings.append(setting)
    assert {"cifar100-extended-class", "omniglot-open-identities", "cifar100-open-class"} <= set(settings)


def test_every_cell_of_the_pages_tables_of_heads_is_its_results() -> None:
    block = PAGE.split("<!-- figures:heads: from results/heads/*.json -->\n")[1].split("<!-- /figures:heads -->")[0]
    tables = dict(zip(("cifar100-extended-class", "cifar100-extended-class-wider"), block.strip().split("\n\n"), strict=True))
    for setting, table in tables.items():
        found = [[cell.strip() for cell in plain(each)[1:-1].split("|")] for each in table.splitlines()[2:]]
        assert found == [line(row, setting, published=True) for row in rows(setting, "heads")]


@pytest.mark.parametrize(("setting", "words"), SAID)
def test_a_gain_in_the_text_is_in_its_table(setting: str, words: str) -> None:
    gains = {row["method"]: f"{100 * row['gain']:z.0f} ± {100 * row['spread']['gain']:.0f}" for row in rows(setting)}
    said = re.sub(r"{(.+?)}", lambda name: gains[name[1]], words)
    assert said in plain(" ".join(TEXT.split()))
