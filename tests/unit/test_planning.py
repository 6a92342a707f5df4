"""What a plan samples."""

import pytest

from rmvdb import simulate
from rmvdb.planning import LEAST_HELD_OUT, _sizes


def test_a_gallery_of_one_collection_is_sampled_as_asked():
    assert _sizes(20_000, [1_000_000]) == ([20_000], None)
    assert _sizes(20_000, [400]) == ([400], None)


@pytest.mark.parametrize("counts", [[160, 240], [5_000, 95_000], [400_000, 500_000, 100_000]])
def test_what_is_held_out_has_the_proportions_of_the_gallery(counts):
    (newest, *others), held_out = _sizes(20_000, counts)
    assert newest == min(20_000, counts[0])
    for size, count in zip(others, counts[1:], strict=True):
        assert size / 2 / held_out == pytest.approx(count / counts[0], rel=0.02)
    assert held_out + sum(others) / 2 <= simulate.MOST_HELD_OUT * 1.001


def test_few_records_in_the_newest_collection_are_still_measured_on():
    (newest, other), held_out = _sizes(20_000, [1_000, 10_000_000])
    assert (newest, other, held_out) == (1_000, 2 * simulate.MOST_HELD_OUT, LEAST_HELD_OUT)
