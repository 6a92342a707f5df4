"""Whether a failed call is sent again, line by line of the table."""

from __future__ import annotations

from collections import Counter

import pytest
from pymilvus import MilvusException

from rmvdb.engines.milvus.failures import Failure, Step, classify, is_too_large, next_step

REFUSED, FAILED, BUSY, SILENT, CUT = Failure.REFUSED, Failure.FAILED, Failure.BUSY, Failure.SILENT, Failure.CUT


@pytest.mark.parametrize(
    ("seen", "patient", "permitted", "late", "step"),
    [
        ([CUT], False, False, False, Step.RETRY),
        ([CUT, CUT], False, False, False, Step.KILLED),
        ([CUT, CUT], True, True, True, Step.KILLED),
        ([CUT], False, False, True, Step.FATAL),
        ([CUT, BUSY, BUSY], False, False, False, Step.RETRY),
        ([REFUSED], True, True, False, Step.FATAL),
        ([FAILED], True, True, False, Step.FATAL),
        ([BUSY] * 9, False, False, False, Step.RETRY),
        ([BUSY], True, True, True, Step.FATAL),
        ([SILENT], False, False, False, Step.RETRY),
        ([SILENT, SILENT], False, False, False, Step.FATAL),
        ([SILENT, SILENT], False, True, False, Step.RETRY),
        ([SILENT], True, False, False, Step.SLOW),
        ([SILENT] * 9, True, False, False, Step.SLOW),
        ([SILENT], True, False, True, Step.FATAL),
        ([SILENT], False, True, True, Step.FATAL),
    ],
)
def test_after_these_failures_of_a_call_this_comes_next(
    seen: list[Failure], patient: bool, permitted: bool, late: bool, step: Step
) -> None:
    assert next_step(seen[-1], Counter(seen), cuts=2, patient=patient, permitted=permitted, late=late) is step


@pytest.mark.parametrize(
    ("said", "quoted", "failure"),
    [
        ("fail to search: segment not found[segment=47]", "not (a == 1)", BUSY),
        ("fail to search: segment not found[segment=47]", "segment == 1 and found == 2", BUSY),
        ("fail to search: node not found[node=5]", "not (node == 1)", BUSY),
        ("fail to search: node offline[node=5]", "id in ['node-12']", BUSY),
        ("fail to search: channel not available[channel=x]", "not (channel == 1)", BUSY),
        ("query node is not ready", "ready == true", BUSY),
        ("worker(1) query failed: context canceled", "context == 'a'", BUSY),
        ("cannot parse: a == 'node offline', at node, near offline", "a == 'node offline'", FAILED),
        ("fail to search on node 5: cannot parse a == 'offline'", "a == 'offline'", FAILED),
        ("cannot parse: not (ready == 1) and not ready", "not (ready == 1) and not ready", FAILED),
    ],
)
def test_a_filter_whose_words_are_milvus_words_too_neither_hides_an_answer_nor_gives_one(
    said: str, quoted: str, failure: Failure
) -> None:
    assert classify(MilvusException(code=65535, message=said), sent=True, quoted=quoted) is failure


def test_an_answer_that_is_too_large_is_seen_whatever_words_the_filter_has() -> None:
    too_large = MilvusException(code=2000, message="query results exceed the limit size 67108864")
    assert is_too_large(too_large, "the in [1] and limit == 2 and size == 3")
    assert not is_too_large(MilvusException(code=2000, message="cannot read 'results exceed the limit size'"), str(too_large))
