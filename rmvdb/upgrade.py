"""The conductor: deploy → list → backfill → complete → verify → cut over → clean up, and the way back.

Each step looks at the phase, acts, records what it did, and can be run again after a crash at any line.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rmvdb import catalog, errors, index
from rmvdb.archive import Archive, EmbeddingCache
from rmvdb.artifacts import Artifacts
from rmvdb.backfill import Backfill, Task, Worker
from rmvdb.encoding import Encoder
from rmvdb.ordering import ordered
from rmvdb.planning import Plan, Planner, Question, Report
from rmvdb.protocols import Classifier, Source, VectorStore
from rmvdb.registry import Registry, leg_from_json, leg_to_json, schema_from_json, unpack_ids
from rmvdb.tables import BatchRow, GalleryRow, UpgradeRow, VersionRow
from rmvdb.training import Method
from rmvdb.types import BatchState, Id, Index, Leg, Metric, Phase, Progress
from rmvdb.verify import Report as VerifyReport
from rmvdb.verify import Verify

log = logging.getLogger(__name__)

#: Rounds of late records after which others must be writing into the old collection without end.
ROUNDS = 20
#: Seconds for which a conductor may be silent before another takes its place.
BATON = 10.0
#: Batches put on the work list in one transaction.
LISTED_AT_ONCE = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Hands:
    """What a conductor works with."""

    registry: Registry
    store: VectorStore
    encoder: Encoder
    artifacts: Artifacts
    archive: Archive
    source: Source | None
    #: The embeddings kept for a model version.
    cache: Callable[[str], EmbeddingCache]
    classifier: Callable[[VersionRow], Classifier | None]
    #: The index of new collections.
    index: Index
    #: max_age, longest_search, staleness of every plan, in seconds.
    times: Mapping[str, float]
    #: Records in a batch.
    batch: int
    #: Where plans are kept, and where orders are sorted.
    folder: Path


def _silent(_: str) -> None:
    pass


class Conductor:
    """Upgrades one gallery. `say` hears each step in a sentence, `report` how far a long one is."""

    def __init__(
        self,
        gallery: str,
        hands: Hands,
        *,
        say: Callable[[str], None] = _silent,
        report: Report = lambda *_: None,
        stop: threading.Event | None = None,
    ) -> None:
        self.hands, self.say, self.report = hands, say, report
        self.stop = stop or threading.Event()
        self.registry, self.store = hands.registry, hands.store
        self.gallery: GalleryRow = self.registry.gallery(gallery)

    # --- plan ---------------------------------------------------------------------------------------------------------

    def plan(self, question: Question, *, again: bool = False) -> Plan:
        """What the upgrade would do; changes nothing but the cache of plans and embeddings."""
        leg = self._only_leg(question)
        to = self.registry.version(question.to_version)
        catalog.check_unchanged(self.store, self.registry.collection(leg.collection))
        catalog.check_model(to, self.hands.encoder.embedder(to.base or to.name))
        return self._planner(question).plan(
            question,
            leg,
            to,
            classifier=self.hands.classifier(self.registry.version(leg.model)),
            again=again,
            report=self.report,
        )

    def resolve(self, question: Question) -> Question:
        """The question with `from` as the version that the gallery holds; raises UsageError for a pair that cannot be."""
        if self.registry.version(question.from_version).name == self.registry.version(question.to_version).name:
            raise errors.UsageError(f"An upgrade leads to another version; --from and --to both say {question.to_version!r}")
        held = self.registry.plan(self.gallery.name).legs[0].model
        if question.from_version not in (held, self.registry.version(held).base):
            raise errors.Mismatch(
                f"Gallery {self.gallery.name!r} holds vectors of {held!r}, not of {question.from_version!r}; use --from {held}"
            )
        return replace(question, from_version=held)

    def _only_leg(self, question: Question) -> Leg:
        legs = self.registry.plan(self.gallery.name).legs
        if len(legs) > 1:
            raise errors.UpgradeRunning(
                f"Gallery {self.gallery.name!r} is served from {len(legs)} collections; end its upgrade first: "
                "rmvdb cutover and rmvdb cleanup, or rmvdb rollback"
            )
        if legs[0].model != question.from_version:
            raise errors.Mismatch(f"Gallery {self.gallery.name!r} holds {legs[0].model!r}; use --from {legs[0].model}")
        return legs[0]

    def _planner(self, question: Question) -> Planner:
        return Planner(
            store=self.store,
            encoder=self.hands.encoder,
            artifacts=self.hands.artifacts,
            source=self.hands.source,
            cache=self.hands.cache(question.to_version),
            folder=self.hands.folder / "plans",
        )

    # --- begin and deploy ---------------------------------------------------------------------------------------------

    def begin(
        self, question: Question, plan: Plan, *, until: float = 1.0, cutover: bool = True, execute: bool = False
    ) -> UpgradeRow:
        """Register the upgrade; nothing is served differently yet.

        Raises PlanRefused where the plan would lower the quality, NeedsConsent for a collection that rmvdb did not make.
        """
        if plan.prediction and plan.prediction["verdict"] == "refuse":
            raise errors.PlanRefused(plan.prediction["reason"])
        leg = self._only_leg(question)
        self._check_consent(leg.collection, execute=execute)
        version = self._register_version(question, plan)
        row = self.registry.add_upgrade(
            gallery_id=self.gallery.id,
            from_version=leg.model,
            to_version=version.name,
            old_collection=leg.collection,
            new_collection="",
            phase=Phase.PLANNED,
            method=plan.method,
            order=plan.order,
            plan={},
        )
        # The name carries the upgrade's number, so no collection is ever named like one before it.
        collection = f"{_plain(self.gallery.name)}_{_plain(version.name)}_u{row.id}"
        serving, final = self._legs(collection, leg, version, plan)
        details = {
            "question": plan.question,
            "prediction": plan.prediction,
            "cost": plan.cost,
            "until": until,
            "cutover": cutover,
            "serving": [leg_to_json(each) for each in serving],
            "final": [leg_to_json(each) for each in final],
            "before": [leg_to_json(leg)],
        }
        self.registry.set_upgrade(row.id, new_collection=collection, plan=details)
        return self.registry.upgrade(row.id)

    def _check_consent(self, collection: str, *, execute: bool) -> None:
        row = self.registry.collection(collection)
        if execute:
            self.registry.allow_removal(collection)
        elif row.adopted and not row.removal_allowed:
            raise errors.NeedsConsent(
                f"Collection {collection!r} was not made by rmvdb, and its records will leave it one by one (rmvdb rollback "
                "brings them back until rmvdb cleanup); run the same command with --execute to agree"
            )

    def _register_version(self, question: Question, plan: Plan) -> VersionRow:
        for sha256, kind in (
            (plan.head, "head"),
            (plan.reverse, "reverse"),
            (plan.calibrations[0], "calibration"),
            (plan.calibrations[1], "calibration"),
        ):
            if sha256:
                path = self.hands.artifacts.path(sha256)
                self.registry.add_artifact(sha256=sha256, kind=kind, suffix=path.suffix[1:], size=path.stat().st_size)
        base = self.registry.version(question.to_version)
        if plan.head is None:
            return base
        same = ("embedder", "options", "dim", "metric", "fingerprint", "probes", "probe_kind")
        return self.registry.add_version(
            name=f"{base.name}+{plan.head[:8]}",
            base=base.name,
            head=plan.head,
            classifier=None,  # it reads the vectors before ρ
            **{name: getattr(base, name) for name in same},
        )

    def _legs(self, collection: str, old: Leg, version: VersionRow, plan: Plan) -> tuple[list[Leg], list[Leg]]:
        head = (plan.head,) if plan.head else ()
        new = Leg(
            collection=collection,
            model=version.name,
            metric=Metric(version.metric),
            embedder=version.base or version.name,
            transforms=head,
        )
        if plan.method != Method.NAIVE:
            assert plan.reverse is not None, "every method but naive trains ψ"  # noqa: S101 (a promise of Planner, not input)
            old = replace(old, embedder=new.embedder, transforms=(*head, plan.reverse))
        calibrated = [
            replace(new, calibration=plan.calibrations[1]),
            replace(old, calibration=plan.calibrations[0]),
        ]
        return calibrated, [new]

    def deploy(self, upgrade: UpgradeRow, *, force: bool = False) -> None:
        """Make the new collection, then serve both: from here on queries are embedded by the new model."""
        if upgrade.phase != Phase.PLANNED:
            return
        if not self.store.exists(upgrade.new_collection):
            old = schema_from_json(self.registry.collection(upgrade.old_collection).schema)
            version = self.registry.version(upgrade.to_version)
            schema = replace(old, collection=upgrade.new_collection, dim=version.dim, metric=Metric(version.metric))
            index.check(self.hands.index, dim=schema.dim, metric=schema.metric)
            self.say(
                f"creating collection {schema.collection} ({schema.dim} dimensions, {schema.metric}, {self.hands.index.type})"
            )
            self.store.create(schema, self.hands.index)
            self.registry.add_collection(self.gallery.id, model=upgrade.to_version, schema=schema, search=self.hands.index.search)
        self._serve(upgrade.plan["serving"], force=force)
        self.registry.set_upgrade(upgrade.id, phase=Phase.SERVING_BOTH, note="both collections are searched")
        self.say("serving both collections; queries are embedded by the new model from now on")

    def _serve(self, legs: Sequence[Mapping[str, Any]], *, force: bool) -> None:
        epoch = self.registry.announce(self.gallery.name, [leg_from_json(leg) for leg in legs], self.hands.times)
        told = ""
        while waiting := self.registry.activate(self.gallery.name, epoch, force=force):
            if waiting[0] != told:
                told = waiting[0]
                self.say(f"epoch {epoch} waits: {told}")
            self._check_stop()
            self.stop.wait(0.1)

    # --- backfill -----------------------------------------------------------------------------------------------------

    def task(self, upgrade: UpgradeRow) -> Task:
        """The upgrade as its batches see it."""
        old = self.registry.collection(upgrade.old_collection)
        stand_in = tuple(upgrade.plan.get("stand_in", ()))
        return Task(
            upgrade=upgrade.id,
            gallery=self.gallery.name,
            old=upgrade.old_collection,
            new=upgrade.new_collection,
            version=upgrade.to_version,
            grace=self.registry.plan(self.gallery.name).grace,
            removal_allowed=not old.adopted or old.removal_allowed,
            undoes=upgrade.undoes,
            stand_in=stand_in,
        )

    def list_work(self, upgrade: UpgradeRow) -> None:
        """Make the work list: batches in the order of their confidence, or of the archive for a roll back."""
        if upgrade.listed:
            return
        self.registry.discard_list(upgrade.id)  # of a listing that was interrupted
        first = self.registry.next_priority(upgrade.id)
        work = self._undone(upgrade) if upgrade.undoes else self._in_order(upgrade)
        for batches in _chunks(work, LISTED_AT_ONCE):
            self._check_stop()
            self.registry.add_batches(upgrade.id, batches, first=first)
            first += len(batches)
        self.registry.set_upgrade(upgrade.id, listed=True, note="the work list is made")

    def _in_order(self, upgrade: UpgradeRow) -> Iterator[tuple[list[Id], None]]:
        question = Question(**upgrade.plan["question"])
        leg = leg_from_json(upgrade.plan["before"][0])
        classifier = self.hands.classifier(self.registry.version(leg.model))
        name, order = self._planner(question).order(replace(question, order=upgrade.order), leg, classifier)
        begun = self.registry.listed_ids(upgrade.id)
        self.say(f"listing the records in {name} order")
        self.hands.folder.mkdir(parents=True, exist_ok=True)
        for ids in ordered(
            self.store,
            upgrade.old_collection,
            order,
            batch=self.hands.batch,
            folder=self.hands.folder,
            leave_out=begun.intersection,
            fields=[question.labels] if question.labels else [],
            progress=lambda done, total: self.report("listing", done, total),
        ):
            yield ids, None

    def _undone(self, upgrade: UpgradeRow) -> Iterator[tuple[list[Id], Mapping[str, Any]]]:
        """For a roll back: what each batch moved and the file with its old vectors; each id once, the last reading first."""
        assert upgrade.undoes is not None  # noqa: S101 (the caller looked)
        seen = self.registry.listed_ids(upgrade.id)
        rows: list[tuple[int, BatchRow]] = []
        after = 0
        while page := self.registry.batches(upgrade.undoes, after=after):
            rows += [(row.id, row) for row in page if row.archive is not None]
            after = page[-1].id
        for _, row in sorted(rows, key=lambda each: each[0], reverse=True):
            decided = row.state in (BatchState.RETIRED, BatchState.REMOVING)
            moved = [id for id in unpack_ids(row.remove if decided else row.ids) if id not in seen]
            seen.update(moved)
            if moved and row.archive is not None:
                yield moved, row.archive

    def backfill(self, upgrade: UpgradeRow, worker: Worker) -> Progress:
        """Work on batches until all are retired, or the share that was asked for is reached, or it is stopped."""
        return worker.run(
            self.task(upgrade),
            self._backfill(upgrade),
            until=upgrade.plan["until"],
            stop=self.stop,
            progress=lambda now: self.report("backfilling", now.done, now.total),
        )

    def _backfill(self, upgrade: UpgradeRow) -> Backfill:
        chain = self.hands.encoder.chain(upgrade.to_version)
        return Backfill(
            registry=self.registry,
            store=self.store,
            encoder=self.hands.encoder,
            source=self.hands.source,
            archive=self.hands.archive,
            cache=self.hands.cache(chain.embedder),
        )

    def complete(self, upgrade: UpgradeRow, worker: Worker) -> None:
        """Until the old collection, counted at Strong twice and one grace apart, holds nothing but quarantined records.

        Records that other programs put there meanwhile are found and moved; EngineError where they never stop coming.
        """
        task = self.task(upgrade)
        quiet = False
        for _ in range(ROUNDS):
            late = self._list_late(task)
            if late:
                self.say(f"{late} records came into {task.old} meanwhile; moving them")
                self.backfill(upgrade, worker)
            elif quiet:
                return
            else:
                self.say(f"{task.old} is empty; looking again in {task.grace:g} s")
                self.stop.wait(task.grace)
            quiet = not late
            self._check_stop()
        raise errors.EngineError(
            f"Other programs keep writing into {task.old!r} ({late} records since the last look); stop them, then: rmvdb cutover"
        )

    def _list_late(self, task: Task) -> int:
        aside = {row.record for row in self.registry.quarantined(task.upgrade)}
        late = 0
        for page in self.store.scan(task.old, page=self.hands.batch):
            ids = [record.id for record in page if str(record.id) not in aside]
            if ids:
                first = self.registry.next_priority(task.upgrade)
                self.registry.add_batches(task.upgrade, [(ids, None)], first=first)
            late += len(ids)
        return late

    # --- verify and cut over ------------------------------------------------------------------------------------------

    def verify(self, upgrade: UpgradeRow, *, sample: int = 200) -> VerifyReport:
        """Compare the new collection with what it was filled from."""
        check = Verify(
            registry=self.registry,
            store=self.store,
            encoder=self.hands.encoder,
            source=self.hands.source,
            archive=self.hands.archive,
        )
        return check.run(self.task(upgrade), sample=sample, progress=lambda done, total: self.report("verifying", done, total))

    def cut_over(self, upgrade: UpgradeRow, worker: Worker, *, force: bool = False) -> None:
        """Complete, verify, then serve the new collection alone."""
        if upgrade.phase == Phase.CUT_OVER:
            return
        if upgrade.phase != Phase.SERVING_BOTH or not upgrade.listed:
            raise errors.WrongPhase(f"The upgrade is {upgrade.phase}; run rmvdb upgrade until its backfill is done")
        left = self.registry.counts(upgrade.id).keys() - {BatchState.RETIRED}
        if left:
            now = self.registry.progress(upgrade.id)
            raise errors.WrongPhase(
                f"The backfill is at {now.done} of {now.total} records; run rmvdb upgrade or rmvdb worker until it is done"
            )
        self._refuse_quarantined(upgrade)
        self.complete(upgrade, worker)
        self._refuse_quarantined(upgrade)
        self.say("verifying")
        report = self.verify(upgrade)
        if not report.ok:
            raise errors.VerifyFailed(
                f"{report.problems} differences, such as: {report.examples[0]}; both collections stay in service: rmvdb verify"
            )
        self._serve(upgrade.plan["final"], force=force)
        self.registry.set_upgrade(
            upgrade.id, phase=Phase.CUT_OVER, note=f"verified {report.records} records; only {upgrade.new_collection} is searched"
        )
        self.say(f"cut over: {report.records} records verified, only {upgrade.new_collection} is searched now")

    def _refuse_quarantined(self, upgrade: UpgradeRow) -> None:
        if aside := self.registry.quarantined(upgrade.id):
            raise errors.WrongPhase(
                f"{len(aside)} records are quarantined, such as {aside[0].record!r} ({aside[0].reason}); they stay findable "
                "in the old collection: rmvdb quarantine list, then retry or drop, then rmvdb cutover"
            )

    def clean_up(self, upgrade: UpgradeRow) -> None:
        """Drop the old collection, the archive, the work list and the intents; there is no way back from here."""
        if upgrade.phase != Phase.CUT_OVER:
            raise errors.WrongPhase(f"The upgrade is {upgrade.phase}; clean up comes after cut-over")
        self._wait_since(upgrade, Phase.CUT_OVER)
        if self.store.exists(upgrade.old_collection):
            if left := self.store.count(upgrade.old_collection):
                raise errors.WrongPhase(
                    f"{left} records came into {upgrade.old_collection!r} after cut-over; write them through rmvdb's client, "
                    "remove them there, then clean up again"
                )
            self.store.drop(upgrade.old_collection)
        self.registry.mark_dropped(upgrade.old_collection)
        for each in filter(None, (upgrade.id, upgrade.undoes)):
            self.hands.archive.clear(self.gallery.name, str(each))
            self.registry.forget_work(each)
        self.registry.set_upgrade(upgrade.id, phase=Phase.ENDED, note=f"{upgrade.old_collection} and its archive are gone")
        self.say(f"{upgrade.old_collection} and its archive are gone")

    def _wait_since(self, upgrade: UpgradeRow, phase: Phase) -> None:
        """One grace lies between a phase and what it makes unsafe for searches that began before it."""
        since = max((row.at for row in self.registry.history(upgrade.id) if row.phase == phase), default=0.0)
        grace = self.registry.plan(self.gallery.name).grace
        while (left := since + grace - self.registry.now()) > 0:
            self.say(f"waiting {left:.0f} s for searches that began before")
            self.stop.wait(left)
            self._check_stop()

    # --- the way back -------------------------------------------------------------------------------------------------

    def roll_back(self, upgrade: UpgradeRow) -> UpgradeRow | None:
        """Begin the upgrade back, whose vectors come from the archive; None where nothing had been deployed."""
        if upgrade.undoes is not None:
            raise errors.WrongPhase("This is a roll back already; let it end, clean up, then upgrade again")
        if upgrade.phase == Phase.PLANNED:
            self._abandon(upgrade)
            return None
        new, old = (leg_from_json(leg) for leg in upgrade.plan["serving"])
        final = upgrade.plan["before"]
        if self._can_load(old.model):
            old = replace(old, write_with=old.model)  # what is written there while rolling back is v1's own, not ψ's
        elif upgrade.method != Method.NAIVE:
            final = [leg_to_json(replace(old, calibration=None))]  # the new model goes on embedding the queries
        self.say(f"rolling back to {upgrade.from_version}")
        return self.registry.supersede(
            upgrade.id,
            note="rolled back",
            gallery_id=self.gallery.id,
            from_version=upgrade.to_version,
            to_version=upgrade.from_version,
            old_collection=upgrade.new_collection,
            new_collection=upgrade.old_collection,
            undoes=upgrade.id,
            phase=Phase.PLANNED,
            method=upgrade.method,
            order="archive",
            plan={
                "until": 1.0,
                "cutover": True,
                "serving": [leg_to_json(old), leg_to_json(new)],
                "final": final,
                "stand_in": old.transforms[len(new.transforms) :] if upgrade.method != Method.NAIVE else (),
            },
        )

    def _abandon(self, upgrade: UpgradeRow) -> None:
        # The plan in force may be announced already; announcing the one before takes its place.
        self._serve([leg_to_json(leg) for leg in self.registry.plan(self.gallery.name).legs], force=True)
        if self.store.exists(upgrade.new_collection):
            self.store.drop(upgrade.new_collection)
            self.registry.mark_dropped(upgrade.new_collection)
        self.registry.set_upgrade(upgrade.id, phase=Phase.ENDED, note="given up before it was deployed")
        self.say("nothing had been deployed; the upgrade is given up")

    def _can_load(self, version: str) -> bool:
        try:
            self.hands.encoder.embedder(self.hands.encoder.chain(version).embedder)
        except errors.ModelError as exc:
            self.say(f"the embedder of {version} cannot be loaded ({exc}); records written since keep ψ's vector")
            return False
        return True

    # --- all of it ----------------------------------------------------------------------------------------------------

    def advance(self, upgrade: UpgradeRow, worker: Worker, *, force: bool = False) -> UpgradeRow:
        """Go on with an upgrade from wherever it stands until it is cut over, `until` is reached, or it is stopped."""
        with self._baton(upgrade, worker):
            try:
                self._advance(upgrade, worker, force=force)
            except errors.RmvdbError as exc:
                self.registry.set_upgrade(upgrade.id, reason=str(exc))
                raise
            self.registry.set_upgrade(upgrade.id, reason="")
        return self.registry.upgrade(upgrade.id)

    def _advance(self, upgrade: UpgradeRow, worker: Worker, *, force: bool) -> None:
        self.deploy(upgrade, force=force)
        upgrade = self.registry.upgrade(upgrade.id)
        if upgrade.phase != Phase.SERVING_BOTH:
            return
        self.list_work(upgrade)
        upgrade = self.registry.upgrade(upgrade.id)
        self.backfill(upgrade, worker)
        done = not self.registry.counts(upgrade.id).keys() - {BatchState.RETIRED}
        if done and not self.stop.is_set() and upgrade.plan["cutover"]:
            self.cut_over(upgrade, worker, force=force)

    @contextmanager
    def _baton(self, upgrade: UpgradeRow, worker: Worker) -> Iterator[None]:
        """Be the one process that makes batches and changes phases; UpgradeRunning where another is."""
        self._take_baton(upgrade, worker)
        ended = threading.Event()

        def hold() -> None:
            while not ended.wait(BATON / 4):
                try:
                    self.registry.lead(upgrade.id, worker.name, BATON)
                except errors.RegistryError as exc:
                    log.warning("The baton could not be held: %s", exc, extra={"action": "baton"})

        holder = threading.Thread(target=hold, name="rmvdb-baton", daemon=True)
        holder.start()
        try:
            yield
        finally:
            ended.set()
            holder.join()
            self.registry.lead(upgrade.id, worker.name, 0)

    def _take_baton(self, upgrade: UpgradeRow, worker: Worker) -> None:
        """Wait for the baton of a conductor that is silent, as after a kill; refuse at the first sign that it lives."""
        seen: float | None = None
        while not self.registry.lead(upgrade.id, worker.name, BATON):
            row = self.registry.upgrade(upgrade.id)
            if seen is None:
                seen = row.conductor_until
                self.say(f"{row.conductor} has this upgrade; taking over if it is silent for {BATON:g} s")
            elif row.conductor_until != seen:
                raise errors.UpgradeRunning(f"{row.conductor} is at work on this upgrade; watch it with rmvdb status --watch")
            self._check_stop()
            self.stop.wait(0.2)

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise errors.Stopped("Stopped; the same command goes on from here")


def _plain(name: str) -> str:
    """A name as collections may have it: letters, digits, underscores."""
    return "".join(each if each.isascii() and each.isalnum() else "_" for each in name)


def _chunks(work: Iterable[Any], size: int) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for each in work:
        chunk.append(each)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
