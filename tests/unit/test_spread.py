"""How test processes share the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import spread

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("place", sorted(spread.BY_TEST))
def test_a_file_that_is_given_out_test_by_test_is_there_and_makes_nothing_for_all_its_tests(place: str) -> None:
    """Else each process would make it again."""
    files = sorted((ROOT / place).glob("*.py")) or [ROOT / place]
    for file in files:
        test, text = f"{file.relative_to(ROOT)}::test_a[one]", file.read_text()
        assert spread.unit(test) == test
        assert 'scope="module"' not in text
        assert "def milvus_server" not in text
        assert " milvus_server:" not in text


def test_any_other_file_stays_with_one_process() -> None:
    assert spread.unit("tests/contract/test_store.py::test_any_text_is_an_id[server]") == "tests/contract/test_store.py"


def run(folder: Path, options: str) -> str:
    """Make six files of two tests each and return what pytest prints of them with this plugin."""
    for number in range(6):
        (folder / f"test_{number}.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    plugin = ["-p", "tests.support.spread", "-c", "/dev/null", "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", *options.split(), *plugin, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout


def test_a_run_by_time_begins_no_further_file_and_says_how_many_tests_it_left_out(tmp_path: Path) -> None:
    """CI has an hour, on slow machines too."""
    printed = run(tmp_path, "-n 1 --dist loadfile --no-loadscope-reorder --minutes 0")

    assert "2 passed" in printed
    assert "10 tests did not begin in 0 minutes" in printed


def test_another_seed_begins_with_other_files(tmp_path: Path) -> None:
    """So that what one run leaves out, another runs."""
    first, other = (run(tmp_path, f"--co -q --seed {seed}").split("\n\n")[0].split() for seed in "ab")

    assert sorted(first) == sorted(other)
    assert first != other
