"""Whether a failed call is sent again, line by line of the table."""

from __future__ import annotations

from collections import Counter

import pytest

from rmvdb.engines.milvus.failures import Failure, Step, next_step

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
