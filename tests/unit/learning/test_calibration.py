"""A calibration changes the scale of a leg and never its order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmvdb.errors import ArtifactError, PlanRefused
from rmvdb.learning import calibration
from rmvdb.learning.calibration import Calibration


def sample(seed=0, n=4000, shift=0.0):
    rng = np.random.default_rng(seed)
    relevant = rng.random(n) < 0.1
    distances = rng.normal(np.where(relevant, 0.3, 0.8) + shift, 0.2).astype(np.float32)
    return distances, relevant


@st.composite
def calibrations(draw):
    """Fitted on anything: few pairs or many, ties, no relation between distance and relevance."""
    n = draw(st.integers(2, 200))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    distances = rng.choice(rng.normal(size=draw(st.integers(2, n))).astype(np.float32), n)
    relevant = rng.random(n) < draw(st.floats(0.05, 0.95))
    distances[:2], relevant[:2] = (-1.0, 2.0), (True, False)
    return calibration.fit(distances, relevant)


distances32 = st.lists(st.floats(-4, 4, width=32).filter(lambda d: d == 0 or abs(d) > 1e-6), min_size=2, max_size=40)


@settings(deadline=None)
@given(calibrations(), distances32)
def test_the_order_of_float32_distances_stays_and_no_two_become_equal(fitted, distances):
    unique = np.unique(np.array(distances, dtype=np.float32))
    mapped = fitted.apply(unique)
    assert mapped.dtype == np.float64
    assert (np.diff(mapped) > 0).all()


@settings(deadline=None)
@given(calibrations(), st.lists(st.floats(width=32), max_size=40))
def test_each_distance_is_mapped_by_the_formula_of_its_piece_bit_for_bit(fitted, distances):
    x, y = np.array(fitted.x), np.array(fitted.y)
    d = np.array([*distances, *fitted.x], dtype=np.float64)
    expected = []
    with np.errstate(invalid="ignore"):
        for each in d:
            piece = int(np.clip(np.searchsorted(x, each, side="right") - 1, 0, len(x) - 2))
            mapped = y[piece] + (y[piece + 1] - y[piece]) / (x[piece + 1] - x[piece]) * (each - x[piece])
            expected.append(mapped if piece == len(x) - 2 else np.minimum(mapped, y[piece + 1]))
    assert fitted.apply(d).tobytes() == np.array(expected).tobytes()


@settings(deadline=None)
@given(calibrations(), st.floats(-10, 10, width=32))
def test_equal_distances_stay_equal(fitted, distance):
    mapped = fitted.apply(np.array([distance, 0.5, distance], dtype=np.float32))
    assert mapped[0] == mapped[2]
    assert fitted.apply(np.array([distance], dtype=np.float64))[0] == mapped[0]


@settings(deadline=None)
@given(calibrations())
def test_it_rises_through_its_knots_and_their_neighbours(fitted):
    knots = np.array(fitted.x)
    near = np.sort(np.concatenate([knots, np.nextafter(knots, -np.inf), np.nextafter(knots, np.inf)]))
    assert (np.diff(fitted.apply(near)) >= 0).all()
    np.testing.assert_allclose(fitted.apply(knots), fitted.y)


@settings(deadline=None)
@given(calibrations(), distances32)
def test_a_file_gives_back_the_same_calibration(fitted, distances):
    again = Calibration.from_bytes(fitted.to_bytes())
    assert again == fitted
    assert again.to_bytes() == fitted.to_bytes()
    assert (again.apply(np.array(distances)) == fitted.apply(np.array(distances))).all()


def test_it_gives_minus_the_log_odds_of_relevance():
    distances, relevant = sample(n=200_000)
    fitted = calibration.fit(distances, relevant)
    for place in (0.3, 0.5, 0.7):
        near = np.abs(distances - place) < 0.02
        share = relevant[near].mean()
        assert fitted.apply(np.array([place]))[0] == pytest.approx(np.log((1 - share) / share), abs=0.5)


def test_two_legs_that_differ_only_by_a_shift_come_to_one_scale():
    one, other = calibration.fit(*sample(n=50_000)), calibration.fit(*sample(n=50_000, shift=5.0))
    places = np.linspace(0.2, 0.9, 8)
    np.testing.assert_allclose(one.apply(places), other.apply(places + 5), atol=1e-3)


def test_matched_distances_are_distributed_as_in_the_other_leg():
    rng = np.random.default_rng(0)
    others = rng.gamma(2.0, size=100_000)
    distances = 3.0 * others**0.5 + 0.1 * rng.normal(size=len(others)) - 7.0
    matched = calibration.match(distances, others).apply(distances)
    for share in (0.001, 0.01, 0.1, 0.5):
        assert np.quantile(matched, share) == pytest.approx(np.quantile(others, share), rel=0.05)


def test_distances_that_two_legs_agree_on_stay_as_they_are():
    distances = np.random.default_rng(0).random(5000)
    places = np.linspace(0.01, 0.99, 20)
    np.testing.assert_allclose(calibration.match(distances, distances).apply(places), places, atol=1e-3)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1), distances32)
def test_matched_distances_keep_their_order_and_none_become_equal(n, seed, asked):
    rng = np.random.default_rng(seed)
    distances, others = (rng.choice(rng.normal(size=5), n + 10) for _ in range(2))
    distances[:2], others[:2] = (-1.0, 2.0), (0.0, 1.0)
    mapped = calibration.match(distances, others).apply(np.unique(np.array(asked, dtype=np.float32)))
    assert (np.diff(mapped) > 0).all()


def test_legs_of_one_distance_cannot_be_matched():
    rising, flat = np.arange(10.0), np.ones(10)
    for distances, others in ((rising[:9], rising[:9]), (rising, flat), (flat, rising), ([], [])):
        with pytest.raises(PlanRefused, match="too small to calibrate"):
            calibration.match(np.array(distances), np.array(others))


def test_any_shape_is_kept_and_infinity_stays_last():
    fitted = calibration.fit(*sample())
    mapped = fitted.apply(np.array([[0.1, np.inf], [0.2, 0.3]]))
    assert mapped.shape == (2, 2)
    assert mapped[0, 1] == np.inf
    assert fitted.apply(np.empty(0)).shape == (0,)


@pytest.mark.parametrize(
    ("distances", "relevant"), [([0.1, 0.2], [False, False]), ([0.1, 0.2], [True, True]), ([0.1, 0.1], [True, False])]
)
def test_a_sample_that_tells_nothing_is_refused(distances, relevant):
    with pytest.raises(PlanRefused, match="too small to calibrate"):
        calibration.fit(np.array(distances), np.array(relevant))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"format": 2, "x": [0, 1], "y": [0, 1]}',
        b'{"format": 1, "x": [0, 0], "y": [0, 1]}',
        b'{"format": 1, "x": [0, 1], "y": [1, 0]}',
        b'{"format": 1, "x": [0], "y": [0]}',
        b'{"format": 1, "x": [0, NaN], "y": [0, 1]}',
    ],
)
def test_a_file_that_is_not_a_strictly_rising_calibration_is_refused(data):
    with pytest.raises(ArtifactError):
        Calibration.from_bytes(data)
