"""A query that is compared with the same records in two legs brings their distances to one scale by itself."""

import numpy as np
import pytest

from rmvdb.errors import ArtifactError, PlanRefused
from rmvdb.learning import calibration, geometry, references
from rmvdb.learning.references import References
from rmvdb.types import Metric
from tests.support.two_spaces import spaces

COSINE = (Metric.COSINE, Metric.COSINE)


def both(old, new, metric=Metric.COSINE):
    """References to these records, whose vectors have length 1."""
    return References(old=old, new=new, old_metric=metric, new_metric=metric)


def shares_within(old, new, scale):
    """The part of each query's records that is nearer in the old leg than its 30 nearest are in the new one."""
    far = np.sort(new, axis=1)[:, 30]
    return (scale(old) < far[:, None]).mean(axis=1)


def test_each_query_finds_as_many_records_near_in_the_old_leg_as_in_the_new_one():
    (old_q, old_g), (new_q, new_g) = spaces()
    kept = both(old_g[:600], new_g[:600])
    old, new = (geometry.distances(q, g[600:], metric=Metric.COSINE) for q, g in ((old_q, old_g), (new_q, new_g)))
    each = kept.calibrations(old_q, new_q)
    own = shares_within(old, new, lambda found: np.stack([one.apply(row) for one, row in zip(each, found, strict=True)]))
    together = shares_within(old, new, calibration.match(old.ravel(), new.ravel(), zero=True).apply)
    assert abs(own - 0.05).max() < 0.05
    assert abs(together - 0.05).max() > 0.06  # one map for all queries brings in too many for some of them


def test_distances_keep_their_order_and_a_record_that_is_the_query_stays_at_0():
    (old_q, old_g), (new_q, new_g) = spaces(queries=3)
    for one in both(old_g, new_g).calibrations(old_q, new_q):
        scaled = one.apply(np.linspace(0, 2, 500))
        assert scaled[0] == 0
        assert (np.diff(scaled) > 0).all()


def test_distances_of_ip_are_matched_below_0():
    (old_q, old_g), (new_q, new_g) = spaces(queries=2)
    for one in both(old_g, new_g, Metric.IP).calibrations(old_q, new_q):
        assert one.x[0] < 0
        assert one.y[0] < 0


def test_a_query_that_is_equally_far_from_all_references_keeps_its_distances():
    old, new = np.eye(3, dtype=np.float32)[[1, 2] * 20], np.eye(3, dtype=np.float32)[[1, 2] * 20]
    (one,) = both(old, new, Metric.IP).calibrations(np.eye(3)[:1], np.eye(3)[:1])
    np.testing.assert_array_equal(one.apply(np.array([-0.5, 0.7, 3.0])), [-0.5, 0.7, 3.0])


def test_references_lead_to_the_one_leg_without_them():
    (old_q, old_g), (new_q, new_g) = spaces(queries=4)
    kept = both(old_g, new_g)
    none, old = references.scales([None, kept], [new_q, old_q])
    distances = geometry.distances(old_q, old_g[:9], metric=Metric.COSINE).astype(np.float64)
    expected = [one.apply(row) for one, row in zip(kept.calibrations(old_q, new_q), distances, strict=True)]
    assert none is None
    np.testing.assert_array_equal(old(distances.ravel(), [9] * 4).reshape(4, 9), expected)
    np.testing.assert_array_equal(old(distances[2, :5], [0, 0, 5, 0]), expected[2][:5])  # legs may find unlike numbers of hits
    back, *_ = references.scales([kept, None], [old_q, new_q])  # a roll back has the legs in the other order
    np.testing.assert_array_equal(back(distances.ravel(), [9] * 4).reshape(4, 9), expected)


def test_distances_stay_as_they_are_if_the_leg_that_references_lead_to_is_gone():
    (old_q, old_g), (_, new_g) = spaces(queries=4)
    kept = both(old_g, new_g)
    assert references.scales([kept, kept], [old_q, old_q]) == [None, None]


def test_references_come_back_from_their_file_and_nothing_else_does():
    (_, old_g), (_, new_g) = spaces(queries=1, records=50)
    kept = both(old_g, new_g)
    again = references.read(kept.to_bytes())
    np.testing.assert_array_equal(again.old, old_g)
    np.testing.assert_array_equal(again.new, new_g)
    assert again.to_bytes() == kept.to_bytes()
    assert (again.old_metric, again.new_metric) == COSINE
    one = calibration.Calibration(x=(0.0, 1.0), y=(0.0, 2.0))
    assert references.read(one.to_bytes()) == one
    for data in (b"", b"no file", kept.to_bytes()[:-3]):
        with pytest.raises(ArtifactError, match="plan again"):
            references.read(data)


def test_too_few_records_are_no_references():
    (_, old_g), (_, new_g) = spaces(queries=1, records=1200)
    with pytest.raises(PlanRefused, match="19 records are too few"):
        references.kept(old_g[:19], new_g[:19], *COSINE)
    assert len(references.kept(old_g, new_g, *COSINE).old) == references.MOST


def test_kept_vectors_of_cosine_have_length_1_and_others_keep_theirs():
    (_, old_g), (_, new_g) = spaces(queries=0, records=64)
    kept = references.kept(3 * old_g, 3 * new_g, Metric.COSINE, Metric.L2)
    np.testing.assert_allclose(kept.old, old_g, atol=1e-6)
    np.testing.assert_array_equal(kept.new, 3 * new_g)


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.IP, Metric.L2])
def test_kept_vectors_do_not_keep_the_whole_sample_in_memory(metric):
    (_, old_g), (_, new_g) = spaces(queries=0, records=1200)
    kept = references.kept(old_g, new_g, metric, metric)
    assert not np.shares_memory(kept.old, old_g)
    assert not np.shares_memory(kept.new, new_g)
