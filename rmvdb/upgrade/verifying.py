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

#: Seconds for which what was compared counts, when a comparison that was interrupted goes on.
COUNTS = 3600.0


def verify(lead: Lead, upgrade: UpgradeRow, *, sample: int = 200) -> Report:
    """Compare all of it, now."""
    return _compare(lead, upgrade, sample=sample)


def expect_verified(lead: Lead, upgrade: UpgradeRow) -> Report:
    """Compare it, from where that was interrupted; VerifyFailed where anything differs."""
    begun = _begun(lead, upgrade)
    lead.say(f"verifying{', from where it stood' if begun else ''}")
    since = begun[1] if begun else lead.registry.now()

    def keep(at: Position) -> None:
        lead.registry.set_upgrade(upgrade.id, verifying=asdict(at) | {"since": since}, baton=lead.baton)

    report = _compare(lead, upgrade, begun=begun[0] if begun else None, keep=keep)
    if report.ok:
        return report
    lead.registry.set_upgrade(upgrade.id, verifying=None, baton=lead.baton)  # whatever is done about it, all is compared again
    raise errors.VerifyFailed(
        f"{counted(report.problems, 'difference')}, such as: {report.examples[0]}; both collections stay in service: rmvdb verify"
    )


def _begun(lead: Lead, upgrade: UpgradeRow) -> tuple[Position, float] | None:
    """Where one was interrupted, and since when it goes on."""
    kept = dict(lead.registry.upgrade(upgrade.id).verifying or {})
    since = kept.pop("since", 0.0)
    return (Position(**kept), since) if kept and lead.registry.now() - since < COUNTS else None


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
