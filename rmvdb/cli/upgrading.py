"""The `rmvdb upgrade` command: begin an upgrade, or resume it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rmvdb import errors
from rmvdb.cli import show_plan
from rmvdb.cli.context import conducting, go_on, open_app
from rmvdb.cli.options import AUTO, Finite, force_option, make_question, missing_option, plan_options

if TYPE_CHECKING:
    from rmvdb.app.wiring import App
    from rmvdb.cli.progress import Reporter
    from rmvdb.planning.plan import Plan
    from rmvdb.planning.question import Question
    from rmvdb.registry.tables import UpgradeRow
    from rmvdb.upgrade.run import Conductor


@click.command()
@plan_options
@click.option("--until", type=Finite(0, 1), default=1.0, show_default=True, help="Stop at this share of the gallery.")
@click.option("--no-cutover", is_flag=True, help="Keep both collections in service at the end.")
@click.option("--detach", is_flag=True, help="Plan and deploy, then leave the backfill to workers.")
@click.option("--collection", metavar="NAME", help="Name of the new collection [default: gallery, version and a number].")
@click.option(
    "--execute",
    is_flag=True,
    help="Allow removing records from an adopted collection. Without it, such an upgrade is a dry run,"
    " unless it keeps the original.",
)
@click.option("--accept-risk", is_flag=True, help="Go on although the plan has a warning.")
@missing_option
@force_option
def upgrade(
    gallery: str | None,
    again: bool,
    method: str,
    until: float,
    no_cutover: bool,
    detach: bool,
    collection: str | None,
    execute: bool,
    accept_risk: bool,
    accept_missing: bool,
    force: bool,
    **options: Any,
) -> None:
    """Plan, deploy, backfill and cut over. Ctrl-C stops it. Run the same command to resume.

    If another upgrade is unfinished, this one takes its place and continues from where that one is.

    \b
    Example:
      rmvdb upgrade --from v1 --to v2
      rmvdb upgrade --from v1 --to v2 --method rm --labels category --until 0.5
    """
    app = open_app()
    name = app.gallery_name(gallery)
    asked: dict[str, Any] = {"until": until, "cutover": not no_cutover, "execute": execute}
    with conducting(app, name) as (conductor, report):
        row = _unfinished(app, name, options["from_version"], options["to_version"])
        if row is not None:
            _refuse_another_way(row, method, options)
            _refuse_another_name(row, collection)
            row = _resumed(app, row, report, **asked)
        elif _is_done(app, name, options["from_version"], options["to_version"]):
            report.say(f"gallery {name} holds {options['to_version']} already")
            return
        else:
            question = conductor.resolve(make_question(name, options, method=method))
            row = _begun(app, conductor, question, report, again=again, accept_risk=accept_risk, collection=collection, **asked)
            if row is None:
                return
        if accept_missing:
            app.registry.set_upgrade(row.id, plan=replace(row.plan, accept_missing=True))
            row = app.registry.upgrade(row.id)
        go_on(app, conductor, row, report, detach=detach, force=force)


def _begun(
    app: App,
    conductor: Conductor,
    question: Question,
    report: Reporter,
    *,
    again: bool,
    accept_risk: bool,
    until: float,
    cutover: bool,
    execute: bool,
    collection: str | None,
) -> UpgradeRow | None:
    """Plan an upgrade and begin it, or return None if this was a dry run."""
    if collection is not None:
        conductor.check_name(collection)
    yours = [each for each in question.old if _is_kept(app, each) and not (execute or question.instant_rollback)]
    plan = _planned(conductor, question, report, again=again, yours=yours)
    _refuse_risk(plan, accepted=accept_risk)
    if yours and not (plan.prediction and plan.prediction["verdict"] == "refuse"):
        report.say(_way_to_agree(yours))
        return None
    return conductor.begin(question, plan, app.worker(), until=until, cutover=cutover, execute=execute, collection=collection)


def _planned(conductor: Conductor, question: Question, report: Reporter, *, again: bool, yours: Sequence[str]) -> Plan:
    """Plan an upgrade and show the plan. Say first if it needs the user's consent."""
    if yours:
        report.say(f"dry run: rmvdb did not make {' and '.join(yours)}. Without --execute it plans and changes nothing")
    plan = conductor.plan(question, again=again)
    report.show(lambda: show_plan.print_plan(plan))
    return plan


def _way_to_agree(yours: Sequence[str]) -> str:
    return (
        "dry run: nothing has changed. To upgrade, run the same command with --execute. Records then leave "
        f"{' and '.join(yours)} one by one, and rmvdb rollback brings them back until rmvdb cleanup"
    )


def _refuse_risk(plan: Plan, *, accepted: bool) -> None:
    """Raise NeedsConsent if the plan has a warning that is not accepted."""
    if plan.prediction and plan.prediction["verdict"] == "warn" and not accepted:
        raise errors.NeedsConsent(f"{plan.prediction['reason']}; run the same command with --accept-risk to go on all the same")


def _resumed(app: App, row: UpgradeRow, report: Reporter, *, until: float, cutover: bool, execute: bool) -> UpgradeRow:
    """Take the command's options over into an unfinished upgrade, and return its row."""
    report.say(f"continuing upgrade {row.id} by {row.method} in {row.order} order: {row.phase}")
    app.registry.set_upgrade(row.id, plan=replace(row.plan, until=until, cutover=cutover))
    if execute:
        for collection in row.old_collections:
            app.registry.allow_removal(collection)
    return app.registry.upgrade(row.id)


def _unfinished(app: App, gallery: str, from_version: str, to_version: str) -> UpgradeRow | None:
    """Return the gallery's unfinished upgrade if this command resumes it, else None."""
    from rmvdb.registry.upgrade_plan import EpochName

    row = app.registry.active_upgrade(app.registry.gallery(gallery).id)
    app.registry.version(from_version)
    app.registry.version(to_version)
    if row is None or row.undoes is not None:
        return None
    sources = set().union(*(_names(app, leg.model) for leg in row.plan.legs(EpochName.BEFORE)))
    return row if from_version in sources and to_version in _names(app, row.to_version) else None


def _is_kept(app: App, collection: str) -> bool:
    """Return whether records may not leave a collection yet, because rmvdb did not make it."""
    row = app.registry.collection(collection)
    return row.adopted and not row.removal_allowed


#: Options, besides method and order, that an upgrade takes only when it begins, by their names in the question.
_FROM_THE_START = {
    name: f"--{name.replace('_', '-')}"
    for name in ("labels", "sample", "seed", "side", "queries", "instant_rollback", "paper", "rescore")
} | {"objective": "--for"}


def _refuse_another_way(row: UpgradeRow, method: str, options: dict[str, Any]) -> None:
    """Raise UsageError if the options differ from those that the upgrade began with."""
    question, order = row.plan.question, options["order"]
    for name, wanted, known in (
        ("method", None if method == AUTO else method, (question["method"], row.method)),
        ("order", order, (question["order"], row.order)),
    ):
        if wanted not in (None, *known):
            raise errors.UsageError(
                f"Upgrade {row.id} uses the {name} {known[1]}, not {wanted}; leave --{name} out to resume it, or end it first: "
                "rmvdb rollback"
            )
    for name, option in _FROM_THE_START.items():
        given = click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and options[name] != (before := question.get(name)):
            how = "without" if before is None or before is False else "with another value of"
            raise errors.UsageError(
                f"Upgrade {row.id} began {how} {option}; leave {option} out to resume it, or end it first: rmvdb rollback"
            )


def _refuse_another_name(row: UpgradeRow, collection: str | None) -> None:
    """Raise UsageError if `collection` names another collection than the one that the upgrade fills."""
    if collection not in (None, row.new_collection):
        raise errors.UsageError(
            f"Upgrade {row.id} fills {row.new_collection!r}, not {collection!r}; leave --collection out to resume it, or end it "
            "first: rmvdb rollback"
        )


def _names(app: App, version: str) -> set[str]:
    return {version, app.registry.version(version).base or version}


def _is_done(app: App, gallery: str, from_version: str, to_version: str) -> bool:
    legs = app.registry.plan(gallery).legs
    return len(legs) == 1 and from_version != to_version and to_version in _names(app, legs[0].model)
