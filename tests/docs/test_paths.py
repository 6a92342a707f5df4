"""Files that pages, docstrings and comments name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, WRITTEN

ROOMS = sorted(path.name for path in (ROOT / "rmvdb").iterdir() if (path / "__init__.py").exists())
#: A path from the root of the repository, or a room of rmvdb and a file in it without its `.py`.
NAMED = re.compile(rf"`((?:tests|rmvdb|examples|migrations|docs(?!/reference)|{'|'.join(ROOMS)})/[\w./*]+)`")
PROSE = {page: PAGES[page] for page in WRITTEN} | {"CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text()}
CODE = sorted(path for room in ("rmvdb", "tests", "examples", "docs") for path in (ROOT / room).rglob("*.py"))


def missing(text: str) -> list[str]:
    """Return the paths in backticks that lead to nothing. NAME stands for any name."""
    return [path for path in NAMED.findall(text) if not any(map(_found, (path, f"rmvdb/{path}", f"rmvdb/{path}.py")))]


def _found(path: str) -> bool:
    return any(ROOT.glob(path.replace("NAME", "*").rstrip("/")))


@pytest.mark.parametrize("page", PROSE)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    assert missing(PROSE[page]) == []


def test_every_file_that_code_names_is_there() -> None:
    found = {str(path.relative_to(ROOT)): missing(path.read_text()) for path in CODE if path != Path(__file__)}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_file_that_is_not_there_is_found() -> None:
    text = "`tests/integration/test_gone.py`, `tests/docs/test_paths.py`, `examples/NAME.py`, `planning/gone`, `planning/trial`"
    assert missing(text) == ["tests/integration/test_gone.py", "planning/gone"]
