"""Before only the new collection is searched: it is compared with what it was filled from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from rmvdb import errors
from rmvdb.plural import counted
from rmvdb.tables import UpgradeRow
from rmvdb.upgrade import backfilling
from rmvdb.upgrade.lead import Lead
from rmvdb.verify import Position, Report, Verify


def verify(lead: Lead, upgrade: UpgradeRow, *, sample: int = 200) -> Report:
    """Compare all of it, now."""
    return _compare(lead, upgrade, sample=sample)


def expect_verified(lead: Lead, upgrade: UpgradeRow) -> Report:
    """Compare it, from where that was interrupted; VerifyFailed where anything differs."""
    begun = lead.registry.upgrade(upgrade.id).verifying
    lead.say(f"verifying{', from where it stood' if begun else ''}")

    def keep(at: Position) -> None:
        lead.registry.set_upgrade(upgrade.id, verifying=asdict(at), baton=lead.baton)

    report = _compare(lead, upgrade, begun=Position(**begun) if begun else None, keep=keep)
    if report.ok:
        return report
    lead.registry.set_upgrade(upgrade.id, verifying=None, baton=lead.baton)  # whatever is done about it, all is compared again
    raise errors.VerifyFailed(
        f"{counted(report.problems, 'difference')}, such as: {report.examples[0]}; both collections stay in service: rmvdb verify"
    )


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
