"""Fates: each line of the two truth tables, and that no other evidence leads elsewhere."""

from __future__ import annotations

import itertools

import pytest

from rmvdb.backfill.fate import Evidence, Fate, LaterEvidence, later_fate, record_fate, too_many

READ = {"read": True, "in_old": True, "same": True, "in_new": True}
REMOVE, REMOVE_FROM_NEW, REQUEUE, NOTHING = Fate.REMOVE, Fate.REMOVE_FROM_NEW, Fate.REQUEUE, Fate.NOTHING


@pytest.mark.parametrize(
    ("evidence", "fate"),
    [
        (Evidence(written="open", **READ), REQUEUE),
        (Evidence(written="open", uncopied=True), REQUEUE),
        (Evidence(written="delete", **READ), REMOVE),
        (Evidence(written="delete", uncopied=True), REMOVE),
        (Evidence(written="delete", read=True, in_old=True, same=True), REMOVE),
        (Evidence(written="upsert", in_old=True), REQUEUE),
        (Evidence(written="upsert", in_old=True, in_new=True), REMOVE),
        (Evidence(written="upsert"), REMOVE),
        (Evidence(uncopied=True, **READ), REQUEUE),
        (Evidence(in_old=True, in_new=True), REQUEUE),
        (Evidence(in_new=True), NOTHING),
        (Evidence(read=True, in_old=True, in_new=True), REQUEUE),
        (Evidence(read=True, in_old=True, same=True), REQUEUE),
        (Evidence(**READ), REMOVE),
        (Evidence(read=True, left=True), REMOVE),
        (Evidence(read=True, in_new=True), REMOVE_FROM_NEW),
    ],
    ids=str,
)
def test_a_record_of_a_copied_batch_has_this_fate(evidence: Evidence, fate: Fate) -> None:
    assert record_fate(evidence) is fate


def test_a_record_leaves_old_without_being_in_new_only_if_it_was_deleted_or_is_not_there() -> None:
    names = ("uncopied", "read", "in_old", "same", "in_new", "left")
    for written, *flags in itertools.product(("", "open", "upsert", "delete"), *[(False, True)] * len(names)):
        evidence = Evidence(written=written, **dict(zip(names, flags, strict=True)))
        if record_fate(evidence) is REMOVE and not evidence.in_new:
            assert written == "delete" or not evidence.in_old, evidence


@pytest.mark.parametrize(
    ("evidence", "fate"),
    [
        (LaterEvidence(written="delete"), REMOVE),
        (LaterEvidence(written="upsert"), REQUEUE),
        (LaterEvidence(older=True, same=True), REQUEUE),
        (LaterEvidence(written="upsert", in_new=True), REMOVE),
        (LaterEvidence(in_new=True, older=True), REMOVE),
        (LaterEvidence(in_new=True, same=True), REMOVE),
        (LaterEvidence(in_new=True), REQUEUE),
    ],
    ids=str,
)
def test_a_record_whose_removal_was_decided_earlier_has_this_fate(evidence: LaterEvidence, fate: Fate) -> None:
    assert later_fate(evidence) is fate


@pytest.mark.parametrize(
    ("gone", "of", "share", "many"),
    [(3, 4, 0.01, False), (4, 4, 0.01, True), (10, 1000, 0.01, False), (11, 1000, 0.01, True), (1000, 1000, 1.0, False)],
)
def test_single_deletions_are_few_or_a_small_share(gone: int, of: int, share: float, many: bool) -> None:
    assert too_many(gone, of, share) is many
