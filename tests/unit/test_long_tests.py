"""The tests that `make test` leaves to `make long`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.long_tests import LONG, is_long

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("place", sorted(LONG))
def test_a_place_of_long_tests_is_there(place: str) -> None:
    """Else a test that moved would come back into the short run without a word."""
    file, _, name = place.partition("::")
    assert (ROOT / file).exists()
    assert not name or f"def {name}(" in (ROOT / file).read_text()
    inside = place if name else f"{place}/test_a.py::test_b" if (ROOT / file).is_dir() else f"{place}::test_b"
    assert is_long(inside)
    assert is_long(f"{inside}[one]")
    assert not is_long(f"{file.removesuffix('.py')}_more.py::test_b")


def test_the_two_commands_share_the_tests_between_them() -> None:
    files = ["tests/acceptance/test_suspension.py", "tests/unit/test_text.py"]
    long, short = (_chosen(mark, *files) for mark in ("long", "not long"))
    assert {test.split("::")[0] for test in long} == {files[0]}
    assert {test.split("::")[0] for test in short} == {files[1]}


def _chosen(mark: str, *files: str) -> list[str]:
    """Return the ids of the tests that a run with this mark would run."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", mark, *files]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]
