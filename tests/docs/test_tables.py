"""The tables of methods, orders and sources in the pages have a row for each that rmvdb knows, and no other."""

from __future__ import annotations

import re

from rmvdb.items.sources import SOURCES
from rmvdb.learning.method import Method
from rmvdb.planning.orders.table import ORDERS
from tests.docs.blocks import PAGES


def first_cells(page: str, header: str) -> list[str]:
    """Return the first cell of each row of the table whose first header this is."""
    lines = PAGES[page].splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"| {header} |"))
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(line.split("|")[1].strip())
    return rows


def names(cells: list[str]) -> list[str]:
    """Return what the first quoted word of each cell is."""
    return [re.findall(r"`([^`]*)`", cell)[0] for cell in cells]


def test_the_page_has_every_method_and_the_default() -> None:
    assert sorted(names(first_cells("choosing.md", "`--method`"))) == sorted([*map(str, Method), "auto"])


def test_the_page_has_every_order() -> None:
    assert sorted(names(first_cells("choosing.md", "`--order`"))) == sorted(ORDERS)


def test_the_page_has_every_source() -> None:
    cells = names(first_cells("models-and-sources.md", "spec"))
    assert [cell.partition(":")[0] for cell in cells] == list(SOURCES)
