"""The samples of a plan."""

import numpy as np
import pytest

from rmvdb.errors import UsageError
from rmvdb.planning.planner import LEAST_HELD_OUT, _sizes
from rmvdb.planning.question import Question
from rmvdb.planning.sample import LEAST_SIDED, side_of
from rmvdb.planning.split import MOST_HELD_OUT
from rmvdb.types import Record


def test_a_gallery_of_one_collection_is_sampled_as_asked():
    assert _sizes(20_000, [1_000_000]) == ([20_000], None)
    assert _sizes(20_000, [400]) == ([400], None)


@pytest.mark.parametrize("counts", [[160, 240], [5_000, 95_000], [400_000, 500_000, 100_000]])
def test_the_held_out_part_has_the_proportions_of_the_gallery(counts):
    (newest, *others), held_out = _sizes(20_000, counts)
    assert newest == min(20_000, counts[0])
    for size, count in zip(others, counts[1:], strict=True):
        assert size / 2 / held_out == pytest.approx(count / counts[0], rel=0.02)
    assert held_out + sum(others) / 2 <= MOST_HELD_OUT * 1.001


def test_few_records_in_the_newest_collection_are_still_measured_on():
    (newest, other), held_out = _sizes(20_000, [1_000, 10_000_000])
    assert (newest, other, held_out) == (1_000, 2 * MOST_HELD_OUT, LEAST_HELD_OUT)


def test_a_question_with_queries_is_named_after_the_content_of_their_file(tmp_path):
    def asked(name, text):
        (tmp_path / name).write_text(text)
        return Question(gallery="g", from_version="v1", to_version="v2", queries=str(tmp_path / name)).key

    shoes, hats = '{"item": "red shoes"}', '{"item": "hats"}'
    keys = [
        asked("a", shoes),
        asked("b", '{"item": "red shoes", "answers": [7]}'),
        asked("a", hats),
        asked("b", f"{shoes}\n{hats}"),
    ]
    assert asked("b", shoes) == keys[0]
    assert len(set(keys)) == 4
    assert Question(gallery="g", from_version="v1", to_version="v2").key not in keys


@pytest.mark.parametrize(
    ("text", "saying"),
    [("", "holds no query"), ('{"text": "a"}', r'Line 1 of .* is not a query; write {"item": "a text or a file"}')],
)
def test_a_file_that_holds_no_query_is_refused(tmp_path, text, saying):
    (tmp_path / "log").write_text(text)
    with pytest.raises(UsageError, match=saying):
        Question(gallery="g", from_version="v1", to_version="v2", queries=str(tmp_path / "log")).asked()


def sided(found):
    return [Record(id=id, fields={} if value is None else {"hint": value}) for id, value in enumerate(found)]


def test_records_without_side_information_have_the_zeros_that_they_are_lifted_with():
    made = side_of(sided([None, *([n, 0.5] for n in range(LEAST_SIDED)), None]), "hint")
    assert made.dtype == np.float32
    assert made.tolist() == [[0.0, 0.0], *([n, 0.5] for n in range(LEAST_SIDED)), [0.0, 0.0]]


@pytest.mark.parametrize(
    ("found", "saying"),
    [
        ([[1.0, 2.0]] * (LEAST_SIDED - 1) + [None] * 50, "59 records of the sample have something in field 'hint'"),
        ([None] * 100, "0 records of the sample have"),
        ([[1.0, 2.0]] * 80 + ["blue"], "Field 'hint' of record 80 is 'blue'"),
        ([[1.0]] * 80 + [[1.0, 2.0]], r"record 0 is \[1.0\]"),
        ([[1.0, "2"]] * 80, r"record 0 is \[1.0, '2'\]"),
        ([7] * 80, "record 0 is 7"),
    ],
)
def test_wrong_or_too_little_side_information_is_refused(found, saying):
    with pytest.raises(UsageError, match=saying):
        side_of(sided(found), "hint")
