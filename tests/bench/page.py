"""Tables that a benchmark writes into a page of the documentation."""

from __future__ import annotations

from pathlib import Path


def into_page(page: Path, name: str, table: str) -> None:
    """Write the table of results/NAME.json between the two marks of that name."""
    begin, end = marks(name)
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def marks(name: str) -> tuple[str, str]:
    """Return the lines before and after the table of results/NAME.json."""
    return f"<!-- figures:{name}: from results/{name}.json -->", f"<!-- /figures:{name} -->"
