"""Before the cut-over: compare the new collection with the records that filled it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

from rmvdb import errors
from rmvdb.backfill.fate import too_many
from rmvdb.registry.tables import UpgradeRow
from rmvdb.text import counted
from rmvdb.types import Phase
from rmvdb.upgrade import backfill_step
from rmvdb.upgrade.compare import Verify
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.report import COUNTS, VerifyPosition, VerifyReport

#: Seconds after which a comparison that was interrupted again and again begins anew.
LONGEST = 86_400.0


class Begun(NamedTuple):
    """A comparison that was interrupted: how far it came, and when it began."""

    at: VerifyPosition
    since: float


def verify(context: UpgradeContext, upgrade: UpgradeRow, *, sample: int = 200) -> VerifyReport:
    """Compare all of it, now.

    Raises:
        NotOwner: another registry has taken the gallery, or this one has gone back.
        WrongPhase: nothing is moved yet.
    """
    context.owner.expect(context.gallery.name)
    refuse_planned(upgrade)
    report = _compare(context, upgrade, sample=sample)
    if not report.ok:
        _forget(context, upgrade)
    return report


def refuse_planned(upgrade: UpgradeRow) -> None:
    """Raise WrongPhase if nothing can have moved yet."""
    if upgrade.phase == Phase.PLANNED:
        command = "rollback" if upgrade.undoes else "upgrade"
        raise errors.WrongPhase(f"The upgrade is {upgrade.phase}: there is nothing to compare yet; run rmvdb {command} first")


def check_of(context: UpgradeContext) -> Verify:
    """Return the service that compares the collections of an upgrade."""
    services = context.services
    return Verify(
        registry=context.registry,
        store=context.store,
        loaded_models=services.loaded_models,
        source=services.source,
        archive=services.archive,
        batch=services.batch,
        ahead=services.width,
    )


def begun(context: UpgradeContext, upgrade: UpgradeRow) -> Begun | None:
    """Return where a comparison was interrupted a short time ago."""
    position = {"since": 0.0} | dict(context.registry.upgrade(upgrade.id).verifying or {})
    now, since = context.registry.now(), position.pop("since")
    if "at" not in position or now - position.pop("at") >= COUNTS or now - since >= LONGEST:
        return None
    return Begun(VerifyPosition(**position), since)


def expect_verified(context: UpgradeContext, upgrade: UpgradeRow, interrupted: Begun | None = None) -> VerifyReport:
    """Compare, from where an earlier comparison was interrupted.

    Raises:
        VerifyFailed: there is a difference.
        RecordsMissing: more records are gone than another program's single deletions explain.
    """
    context.announce(f"verifying{', from where it stood' if interrupted else ''}")
    since = interrupted.since if interrupted else context.registry.now()

    def keep_at(at: VerifyPosition) -> None:
        keep(context, upgrade, Begun(at, since))

    report = _compare(context, upgrade, begun=interrupted.at if interrupted else None, keep=keep_at)
    for sentence in report.unread:
        context.say(f"left out: {sentence}")
    if report.approximation:
        context.say(report.approximation)
    if not report.ok:
        _forget(context, upgrade)
        raise errors.VerifyFailed(
            f"{counted(report.problems, 'difference')}, such as: {report.examples[0]}; "
            "both collections stay in service: rmvdb verify names them, and with --repair puts back what was lost"
        )
    _expect_few_missing(context, upgrade, report)
    return report


def _expect_few_missing(context: UpgradeContext, upgrade: UpgradeRow, report: VerifyReport) -> None:
    """Raise RecordsMissing if more records vanished from the old collections than another program's single deletions explain."""
    if not report.missing:
        return
    what = counted(report.missing, "record of the work list is", "records of the work list are")
    sentence = f"{what} gone, such as {report.gone[0]!r}: no batch moved them and no client deleted them"
    if too_many(
        report.missing, context.registry.progress(upgrade.id).total + report.missing, backfill_step.task(context, upgrade).missing
    ):
        _forget(context, upgrade)
        raise errors.RecordsMissing(
            f"{sentence}. If another program deleted them: rmvdb cutover --accept-missing. If another registry works on the same "
            "collection: stop it first"
        )
    context.say(sentence)


def keep(context: UpgradeContext, upgrade: UpgradeRow, begun: Begun | None) -> None:
    """Let the position of an interrupted comparison count although other steps come first, which may take long."""
    if begun is not None:
        position = asdict(begun.at) | {"at": context.registry.now(), "since": begun.since}
        context.registry.set_upgrade(upgrade.id, verifying=position, leader_token=context.leader_token)


def _forget(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    context.registry.set_upgrade(upgrade.id, verifying=None, leader_token=context.leader_token)


def _compare(
    context: UpgradeContext,
    upgrade: UpgradeRow,
    *,
    sample: int = 200,
    begun: VerifyPosition | None = None,
    keep: Callable[[VerifyPosition], None] = lambda _: None,
) -> VerifyReport:
    def progress(done: int, total: int) -> None:
        context.report("verifying", done, total)
        context.check_stop()

    return check_of(context).run(backfill_step.task(context, upgrade), sample=sample, progress=progress, begun=begun, keep=keep)
