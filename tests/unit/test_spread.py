"""How test processes share the tests."""

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
