"""Ranked lists become one list, whatever the legs hold."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rmvdb.learning.calibration import Calibration
from rmvdb.serving.merge import merge_each
from rmvdb.types import Hit
from tests.support.merging import merge


def hits(leg, *found, **fields):
    return [Hit(id=id, distance=distance, leg=leg, fields=fields | {"from": leg}) for id, distance in found]


@st.composite
def searches(draw):
    """Up to four legs of sorted hits over few ids and few distances, so that records are found twice and ties are common."""
    ids = st.integers(0, 12) if draw(st.booleans()) else st.sampled_from(list("abcdefgh"))
    legs, scales = [], []
    for number in range(draw(st.integers(0, 4))):
        found = draw(st.lists(st.tuples(ids, st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])), max_size=10))
        legs.append(hits(f"c{number}", *sorted(found, key=lambda pair: pair[1])))
        slope = draw(st.sampled_from([0.5, 1.0, 2.0]))
        scale = Calibration(x=(0.0, 1.0), y=(-1.0, slope - 1)).apply
        scales.append(draw(st.sampled_from([None, scale])))
    return legs, scales


@settings(deadline=None)  # a busy machine is no failure
@given(searches(), st.integers(0, 20), st.integers(0, 8))
def test_it_is_what_a_slow_merge_by_the_definition_gives(search, limit, offset):
    legs, scales = search
    best = {}
    for number, (leg, scale) in enumerate(zip(legs, scales, strict=True)):
        for hit in leg:
            distance = hit.distance if scale is None else float(scale(np.array([hit.distance]))[0])
            candidate = (distance, number, hit.distance, hit.id)
            best[hit.id] = min(best.get(hit.id, candidate), candidate)
    expected = sorted(best.values())[offset : offset + limit]
    merged = merge(legs, scales, limit=limit, offset=offset)
    assert [(hit.distance, int(hit.leg[1:]), hit.raw, hit.id) for hit in merged] == expected
    for hit in merged:
        first = next(leg for leg in legs if any(other.id == hit.id for other in leg))
        assert hit.fields == next(other.fields for other in first if other.id == hit.id)


@settings(deadline=None)
@given(searches(), st.integers(1, 5), st.integers(1, 12), st.integers(0, 4))
def test_queries_of_one_call_are_merged_as_each_of_them_alone(search, queries, limit, offset):
    legs, scales = search
    if legs:  # each query finds other parts of the legs' hits
        found = [[leg[query:] for query in range(queries)] for leg in legs]
        alone = [merge([leg[query:] for leg in legs], scales, limit=limit, offset=offset) for query in range(queries)]
        assert merge_each(found, scales, limit=limit, offset=offset) == alone


@settings(deadline=None)
@given(searches(), st.integers(1, 6))
def test_pages_put_together_are_the_whole_list_each_record_once(search, size):
    legs, scales = search
    whole = merge(legs, scales, limit=100)
    pages = [merge(legs, scales, limit=size, offset=start) for start in range(0, len(whole) + size, size)]
    assert [hit for page in pages for hit in page] == whole
    assert len({hit.id for hit in whole}) == len(whole)
    assert {hit.id for hit in whole} == {hit.id for leg in legs for hit in leg}


@settings(deadline=None)
@given(searches())
def test_distances_rise_and_each_leg_keeps_its_order(search):
    legs, scales = search
    merged = merge(legs, scales, limit=100)
    assert all(a.distance <= b.distance for a, b in pairwise(merged))
    for leg in {hit.leg for hit in merged}:
        raw = [hit.raw for hit in merged if hit.leg == leg]
        assert raw == sorted(raw)


def test_a_record_found_twice_ranks_by_the_nearer_and_shows_the_fields_of_the_collection_written_to():
    new, old = hits("new", (1, 0.9), price=2), hits("old", (1, 0.2), (2, 0.5), price=1)
    first, second = merge([new, old], [None, None], limit=10)
    assert (first.id, first.distance, first.raw, first.leg, first.fields) == (1, 0.2, 0.2, "old", {"price": 2, "from": "new"})
    assert second.id == 2


def test_calibration_decides_between_legs_and_the_raw_distance_is_kept():
    doubled = Calibration(x=(0.0, 1.0), y=(0.0, 2.0)).apply
    merged = merge([hits("new", ("a", 0.3)), hits("old", ("b", 0.2))], [None, doubled], limit=2)
    assert [(hit.id, hit.distance, hit.raw) for hit in merged] == [("a", 0.3, 0.3), ("b", 0.4, 0.2)]


def test_a_distance_that_is_no_number_ranks_last():
    merged = merge([hits("new", (1, float("nan")), (2, 5.0))], [None], limit=2)
    assert [hit.id for hit in merged] == [2, 1]


def test_it_imports_without_torch():
    code = "import sys, rmvdb.serving.merge, rmvdb.types; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
