"""Before only the new collection is searched: it is compared with what it was filled from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from rmvdb import errors
from rmvdb.plural import counted
from rmvdb.tables import UpgradeRow
from rmvdb.types import Phase
from rmvdb.upgrade import backfilling
from rmvdb.upgrade.lead import Lead
from rmvdb.verify import Position, Report, Verify

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
            "both collections stay in service: rmvdb verify"
        )
    return report


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
    hands = lead.hands
    check = Verify(registry=lead.registry, store=lead.store, encoder=hands.encoder, source=hands.source, archive=hands.archive)

    def progress(done: int, total: int) -> None:
        lead.report("verifying", done, total)
        lead.check_stop()

    return check.run(backfilling.task(lead, upgrade), sample=sample, progress=progress, begun=begun, keep=keep)
