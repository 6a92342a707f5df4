"""Before only the new collection is searched: it is compared with what it was filled from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from rmvdb import errors
from rmvdb.backfill.fate import too_many
from rmvdb.registry.tables import UpgradeRow
from rmvdb.text import counted
from rmvdb.types import Phase
from rmvdb.upgrade import backfill_step
from rmvdb.upgrade.compare import Position, Report, Verify
from rmvdb.upgrade.context import Lead

#: Seconds after which a comparison that was interrupted begins anew.
COUNTS = 600.0


def verify(lead: Lead, upgrade: UpgradeRow, *, sample: int = 200) -> Report:
    """Compare all of it, now; WrongPhase where nothing is moved yet."""
    if upgrade.phase == Phase.PLANNED:
        raise errors.WrongPhase(f"The upgrade is {upgrade.phase}: there is nothing to compare yet; go on with rmvdb upgrade")
    report = _compare(lead, upgrade, sample=sample)
    if not report.ok:
        _forget(lead, upgrade)
    return report


def check_of(lead: Lead) -> Verify:
    """What compares the collections of an upgrade."""
    hands = lead.hands
    return Verify(
        registry=lead.registry,
        store=lead.store,
        encoder=hands.encoder,
        source=hands.source,
        archive=hands.archive,
        batch=hands.batch,
    )


def expect_verified(lead: Lead, upgrade: UpgradeRow) -> Report:
    """Compare it, from where that was interrupted; VerifyFailed where anything differs."""
    begun = _begun(lead, upgrade)
    lead.say(f"verifying{', from where it stood' if begun else ''}")

    def keep(at: Position) -> None:
        lead.registry.set_upgrade(upgrade.id, verifying=asdict(at) | {"at": lead.registry.now()}, baton=lead.baton)

    report = _compare(lead, upgrade, begun=begun, keep=keep)
    _forget(lead, upgrade)  # whatever becomes of it now: another time all is compared
    for sentence in report.unread:
        lead.say(f"left out: {sentence}")
    if not report.ok:
        raise errors.VerifyFailed(
            f"{counted(report.problems, 'difference')}, such as: {report.examples[0]}; "
            "both collections stay in service: rmvdb verify names them, and with --repair puts back what was lost"
        )
    _expect_few_missing(lead, upgrade, report)
    return report


def _expect_few_missing(lead: Lead, upgrade: UpgradeRow, report: Report) -> None:
    """RecordsMissing where more records vanished from the old collections than another program's single deletions."""
    if not report.missing:
        return
    what = counted(report.missing, "record of the work list is", "records of the work list are")
    told = f"{what} gone, such as {report.gone[0]!r}: no batch moved them and no client deleted them"
    if too_many(
        report.missing, lead.registry.progress(upgrade.id).total + report.missing, backfill_step.task(lead, upgrade).missing
    ):
        raise errors.RecordsMissing(
            f"{told}. If another program deleted them: rmvdb cutover --accept-missing. If another registry works on the same "
            "collection: stop it first"
        )
    lead.say(told)


def _begun(lead: Lead, upgrade: UpgradeRow) -> Position | None:
    """Where one was interrupted a moment ago."""
    kept = dict(lead.registry.upgrade(upgrade.id).verifying or {})
    return Position(**kept) if kept and lead.registry.now() - kept.pop("at") < COUNTS else None


def _forget(lead: Lead, upgrade: UpgradeRow) -> None:
    lead.registry.set_upgrade(upgrade.id, verifying=None, baton=lead.baton)


def _compare(
    lead: Lead,
    upgrade: UpgradeRow,
    *,
    sample: int = 200,
    begun: Position | None = None,
    keep: Callable[[Position], None] = lambda _: None,
) -> Report:
    def progress(done: int, total: int) -> None:
        lead.report("verifying", done, total)
        lead.check_stop()

    return check_of(lead).run(backfill_step.task(lead, upgrade), sample=sample, progress=progress, begun=begun, keep=keep)
