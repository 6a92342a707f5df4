"""The conductor: deploy → list → backfill → complete → verify → cut over → clean up, and the way back.

Each step looks at the phase, acts, records what it did, and can be run again after a crash at any line.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rmvdb import catalog, errors, index
from rmvdb.archive import Archive, EmbeddingCache
from rmvdb.artifacts import Artifacts
from rmvdb.backfill import Backfill, Task, Worker
from rmvdb.comparison import Comparison
from rmvdb.encoding import Encoder
from rmvdb.methods import Method
from rmvdb.mirror import Mirror, Position, plans
from rmvdb.ordering import ordered
from rmvdb.planning import Plan, Planner, Question
from rmvdb.plural import counted
from rmvdb.protocols import Classifier, Source, VectorStore
from rmvdb.registry import Registry, key, leg_from_json, leg_to_json, schema_from_json, unpack_ids
from rmvdb.sampling import Report, vectors_of
from rmvdb.status import both, only
from rmvdb.tables import BatchRow, GalleryRow, UpgradeRow, VersionRow
from rmvdb.types import BatchState, Id, IdType, Index, Leg, Metric, Phase, Progress, Query, Record, Vectors
from rmvdb.verify import Report as VerifyReport
from rmvdb.verify import Verify, hashes
from rmvdb.writing import Writes

log = logging.getLogger(__name__)

#: Rounds of late records after which others must be writing into the old collection without end.
ROUNDS = 20
#: Seconds for which a conductor may be silent before another takes its place.
BATON = 10.0
#: Records of the original that are copied under one announcement.
COPIED_AT_ONCE = 500
#: Batches put on the work list in one transaction.
LISTED_AT_ONCE = 50
#: Batches that a gallery is split into at least: they move as a whole, so quality rises, and `--until` is met, in such steps.
STEPS = 50
#: Unless batches would be smaller than this: each costs some 25 ms on Milvus Lite, whatever is in it.
LEAST_BATCH = 20
#: What makes a copy, without and with h.
_COPIES = ("--instant-rollback", "--method fct")


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
    #: Most records in a batch, and in a page of what is read.
    batch: int
    #: Seconds that one call of the store may take.
    longest_call: float
    #: Where plans are kept, and where orders are sorted.
    folder: Path


def _silent(_: str) -> None:
    pass


class Conductor:
    """Upgrades one gallery. `say` hears each step in a sentence, `report` how far a long one is."""

    #: What each step changes outside this process, in order. Tests kill it before and after each of these calls.
    CALLS: ClassVar = {
        "begin": ("registry.add_upgrade",),
        "deploy": (
            "store.create new",
            "registry.add_collection",
            "registry.announce",
            "registry.activate",
            "registry.set_upgrade serving both",
        ),
        # Where the original is kept: before the others of `deploy`.
        "copy": (
            "store.create old",
            "registry.open_intents",
            "store.upsert old",
            "registry.withdraw_intents",
            "registry.set_upgrade copying",
        ),
        "list": ("registry.discard_list", "registry.add_batches", "registry.set_upgrade listed"),
        "switch": ("registry.announce", "registry.activate", "registry.set_upgrade plan"),
        "cut over": ("registry.announce", "registry.activate", "store.move_aliases new", "registry.set_upgrade cut over"),
        "clean up": (
            "registry.begin_clean_up",
            "store.drop old",
            "registry.mark_dropped",
            "archive.clear",
            "registry.end",
        ),
        "supersede": ("registry.set_upgrade paused", "registry.supersede"),
        "roll back": ("registry.supersede",),
        "back to the original": (
            "registry.supersede",
            "registry.announce",
            "registry.activate",
            "store.move_aliases new",
            "registry.set_upgrade cut over",
        ),
    }

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
        #: The baton that it leads by, and the worker for whom, while it does.
        self._holds: int | None = None
        self._worker: Worker | None = None
        self.registry, self.store = hands.registry, hands.store
        self.gallery: GalleryRow = self.registry.gallery(gallery)
        if self.gallery.rebuilding:
            raise errors.RegistryError(
                f"The work on gallery {gallery!r} is being rebuilt; wait until rmvdb registry rebuild has ended, or run it again"
            )

    # --- plan ---------------------------------------------------------------------------------------------------------

    def plan(self, question: Question, *, again: bool = False) -> Plan:
        """What the upgrade would do; changes nothing but the cache of plans and embeddings."""
        legs, to = self._looked_at(question)
        for version in (to, self.registry.version(legs[0].model)) if question.instant_rollback else (to,):
            self._check_index(version)
        return self._planner().plan(
            question,
            legs,
            to,
            classifiers=self._classifiers(legs),
            seen=self._trained_on(),
            again=again,
            report=self.report,
        )

    def simulate(
        self,
        question: Question,
        *,
        methods: Sequence[Method] = tuple(Method),
        orders: Sequence[str] = (),
        queries: Sequence[Query] = (),
    ) -> Comparison:
        """What every method and order (none: all that can be given) would do; changes nothing but the cache of embeddings."""
        legs, to = self._looked_at(question)
        return self._planner().compare(
            question,
            legs,
            to,
            classifiers=self._classifiers(legs),
            methods=methods,
            orders=orders,
            queries=queries,
            seen=self._trained_on(),
            report=self.report,
        )

    def _looked_at(self, question: Question) -> tuple[Sequence[Leg], VersionRow]:
        """The legs in force and the version to come, once it is sure that they are what the registry says."""
        legs = self._old_legs(question)
        to = self.registry.version(question.to_version)
        for leg in legs:
            catalog.check_unchanged(self.store, self.registry.collection(leg.collection))
        catalog.check_model(to, self.hands.encoder.embedder(to.base or to.name))
        return legs, to

    def _check_index(self, version: VersionRow) -> None:
        """ConfigError where a collection of this version cannot have the index that new ones shall have."""
        metric = Metric(version.metric).stored
        index.check(self.hands.index, dim=version.dim, metric=metric, engine=self.store.version())

    def _classifiers(self, legs: Sequence[Leg]) -> list[Classifier | None]:
        return [self.hands.classifier(self.registry.version(leg.model)) for leg in legs]

    def _trained_on(self) -> set[Id]:
        """The records that any upgrade of this gallery was trained on."""
        plans = [row.plan for row in self.registry.upgrades(self.gallery.id)]
        files = {plan["trained_on"] for plan in plans if plan.get("trained_on")}
        return {id for file in files for id in unpack_ids(self.hands.artifacts.get(file))}

    def resolve(self, question: Question) -> Question:
        """The question with `from` as the newest version that the gallery holds, and the collections that it would empty.

        Raises UsageError for a pair that cannot be, UpgradeRunning while the gallery is in an upgrade that cannot be superseded.
        """
        if self.registry.version(question.from_version).name == self.registry.version(question.to_version).name:
            raise errors.UsageError(f"An upgrade leads to another version; --from and --to both say {question.to_version!r}")
        legs = self.registry.plan(self.gallery.name).legs
        self._superseded(legs)
        lifts = question.method is Method.FCT  # a copy of the original, which is kept whole beside it
        if (lifts or question.instant_rollback) and len(legs) > 1:
            raise errors.UsageError(
                f"Gallery {self.gallery.name!r} lies in {len(legs)} collections, and {_COPIES[lifts]} copies one; "
                "end the upgrade that is on, or leave the option out"
            )
        if question.side and question.method not in (None, Method.FCT):
            raise errors.UsageError(f"Only the method fct uses side information, not {question.method}; leave --side out")
        held = {name: leg.model for leg in reversed(legs) for name in (leg.model, self.registry.version(leg.model).base) if name}
        if question.to_version in held:
            raise errors.UsageError(
                f"Gallery {self.gallery.name!r} holds vectors of {question.to_version!r} already; rmvdb rollback leads back"
            )
        if question.from_version not in held:
            raise errors.Mismatch(
                f"Gallery {self.gallery.name!r} holds vectors of {legs[0].model!r}, not of {question.from_version!r}; "
                f"use --from {legs[0].model}"
            )
        return replace(
            question,
            from_version=legs[0].model,
            old=tuple(leg.collection for leg in legs),
            instant_rollback=question.instant_rollback or lifts,
        )

    def _superseded(self, legs: Sequence[Leg]) -> UpgradeRow | None:
        """The unfinished upgrade whose place another may take, where there is one; UpgradeRunning where none may."""
        row = self.registry.active_upgrade(self.gallery.id)
        goes_on = row is not None and row.phase == Phase.SERVING_BOTH and row.undoes is None and not row.original
        if row is None or (goes_on and len(legs) > 1):
            return row
        what = "a roll back" if row.undoes else "an upgrade"
        raise errors.UpgradeRunning(
            f"Gallery {self.gallery.name!r} is in {what} from {row.from_version} to {row.to_version} ({row.phase}); "
            "end it first: rmvdb cleanup, or rmvdb rollback"
        )

    def _old_legs(self, question: Question) -> tuple[Leg, ...]:
        """The legs in force, newest first; Mismatch where they are not those that the question was resolved for."""
        legs = self.registry.plan(self.gallery.name).legs
        if question.old != tuple(leg.collection for leg in legs):
            raise errors.Mismatch(f"Gallery {self.gallery.name!r} is served differently since; run the same command again")
        return legs

    def _planner(self) -> Planner:
        return Planner(
            store=self.store,
            encoder=self.hands.encoder,
            artifacts=self.hands.artifacts,
            source=self.hands.source,
            cache=self.hands.cache,
            folder=self.hands.folder / "plans",
            traffic=lambda: self.registry.traffic(self.gallery.id),
        )

    # --- begin and deploy ---------------------------------------------------------------------------------------------

    def begin(
        self, question: Question, plan: Plan, worker: Worker, *, until: float = 1.0, cutover: bool = True, execute: bool = False
    ) -> UpgradeRow:
        """Register the upgrade, in the place of an unfinished one where there is one; nothing is served differently yet.

        Raises PlanRefused where the plan would lower the quality, NeedsConsent for a collection that rmvdb did not make.
        """
        if plan.prediction and plan.prediction["verdict"] == "refuse":
            raise errors.PlanRefused(plan.prediction["reason"])
        epoch = self.registry.plan(self.gallery.name).epoch
        legs = self._old_legs(question)
        for leg in () if question.instant_rollback else legs:
            self._check_consent(leg.collection, execute=execute)
        version = self._register_version(question, plan)
        # A mirror is written by its own model where that can be loaded, else by ψ. Nothing may be loaded inside a transaction.
        own = question.instant_rollback and (plan.reverse is None or self._can_load(legs[0].model))

        def details(number: int) -> dict[str, Any]:
            made = self._details(number, question, plan, legs, version, own=own)
            return made | {"plan": made["plan"] | {"until": until, "cutover": cutover}}

        values = {
            "gallery_id": self.gallery.id,
            "from_version": legs[0].model,
            "to_version": version.name,
            "phase": Phase.PLANNED,
            "method": plan.method,
            "order": plan.order,
        }
        before = self._superseded(legs)
        if before is None:
            return self.registry.add_upgrade(details, **values)
        with self._making_way(before, worker, version.name):
            note = f"superseded by the upgrade to {version.name}"
            return self.registry.supersede(before.id, details, epoch=epoch, note=note, supersedes=before.id, **values)

    def _details(
        self, number: int, question: Question, plan: Plan, legs: Sequence[Leg], version: VersionRow, *, own: bool
    ) -> dict[str, Any]:
        """What the upgrade of this number works on, and the legs of each of its epochs; `own`: v1 itself writes a mirror."""
        # The name carries the upgrade's number, so no collection is ever named like one before it.
        collection, copy = (f"{_plain(self.gallery.name)}_{_plain(name)}_u{number}" for name in (version.name, legs[0].model))
        # What is listed, which is emptied, too, but for a lifted copy: confidence is read off vectors of the old model.
        listed = [replace(legs[0], collection=copy)] if question.instant_rollback and not plan.lift else legs
        old = [_leg_of(version, collection)] if plan.lift else listed  # in place: its own vectors are replaced
        served = {"before": listed, **self._served(collection, old, version, plan)}
        if question.instant_rollback:
            kept = legs[0] if own else replace(served["serving"][-1], collection=legs[0].collection)
            served |= plans(legs[0], old[0], served, replace(kept, calibration=None))
        asked = {name: getattr(plan, name) for name in ("question", "prediction", "cost", "trained_on", "switch", "lift")}
        return {
            "new_collection": collection,
            "old_collections": [leg.collection for leg in old],
            "plan": asked | {name: _to_json(some) for name, some in served.items()},
        }

    @contextmanager
    def _making_way(self, upgrade: UpgradeRow, worker: Worker, version: str) -> Iterator[None]:
        """Let what is in hand of an upgrade end and nothing begin, so that what it was moving is in one collection."""
        self.say(f"the upgrade to {version} takes the place of that to {upgrade.to_version}; what is in hand of it ends first")
        self.registry.set_upgrade(upgrade.id, paused=True, note=f"paused, to make way for the upgrade to {version}")
        try:
            worker.run(self.task(upgrade), self._backfill(upgrade), until=0.0, stop=self.stop)
            self._check_stop()
            yield
        except BaseException:
            self.registry.set_upgrade(upgrade.id, paused=upgrade.paused, note=f"the upgrade to {version} did not take its place")
            raise

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
        calibrations = ((each, "calibration") for each in (*plan.calibrations, *plan.early))
        made = ((plan.head, "head"), (plan.reverse, "reverse"), (plan.lift, "lift"), (plan.trained_on, "ids"))
        for sha256, kind in (*made, *calibrations):
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
            compatible_with=None,
            **{name: getattr(base, name) for name in same},
        )

    def _served(self, collection: str, old: Sequence[Leg], version: VersionRow, plan: Plan) -> dict[str, Sequence[Leg]]:
        """The legs of each epoch: `serving` until cut-over, `later` in its place from `switch` on, `final` at the end."""
        new = _leg_of(version, collection)
        if plan.lift:
            return {"serving": [new], "final": [new]}
        led = [_led(leg, old[0], new, plan.reverse) if plan.reverse else leg for leg in old]
        serving = _calibrated(new, led, plan.calibrations)
        if plan.switch is None:
            return {"serving": serving, "final": [new]}
        return {"serving": _calibrated(new, old, plan.early), "later": serving, "final": [new]}

    def deploy(self, upgrade: UpgradeRow, *, force: bool = False) -> None:
        """Make the new collection, then serve both."""
        if upgrade.phase != Phase.PLANNED:
            return
        if upgrade.undoes is not None and upgrade.original:
            self._serve_original(upgrade, force=force)
            return
        copied = None
        if upgrade.original and self.registry.plan(self.gallery.name).legs[0].collection != upgrade.new_collection:
            copied = self._copy_original(upgrade, force=force)
        if upgrade.undoes is None and not upgrade.in_place:  # again after a crash, which may have left it half made
            self._create(upgrade.new_collection, upgrade.to_version, like=upgrade.old_collections[0])
        self._serve(upgrade, "serving", force=force, after=copied)
        if upgrade.original:  # whoever wrote by the plan before has ended by now
            self._mirror(upgrade).finish(upgrade.old_collections[0], self.registry.cut_off(self.gallery.name))
        searched = both(upgrade.searched)
        self.registry.set_upgrade(upgrade.id, phase=Phase.SERVING_BOTH, was=Phase.PLANNED, note=searched)
        by = dict.fromkeys(leg["embedder"] for leg in upgrade.plan["serving"] if leg.get("searched", True))
        self.say(f"{searched}; queries are embedded by {' and '.join(by)} from now on")

    def _create(self, collection: str, model: str, *, like: str) -> None:
        old, version = schema_from_json(self.registry.collection(like).schema), self.registry.version(model)
        schema = replace(old, collection=collection, dim=version.dim, metric=Metric(version.metric).stored)
        self._check_index(version)
        self.say(f"creating collection {schema.collection} ({schema.dim} dimensions, {schema.metric}, {self.hands.index.type})")
        self.store.create(schema, self.hands.index)
        if self.store.count(collection) and collection not in self._known():  # in this order: it is known before it is filled
            raise catalog.foreign(collection, "give the upgrade up with rmvdb rollback")
        self.registry.add_collection(self.gallery.id, model=model, schema=schema, search=self.hands.index.search)

    def _known(self) -> set[str]:
        return {row.name for row in self.registry.collections(self.gallery.id)}

    def _is_ours(self, collection: str) -> bool:
        """Whether it is known, or empty as one that was made and not registered."""
        try:
            return collection in self._known() or not self.store.count(collection)
        except errors.EngineError:  # not loaded, or not there
            return False

    def _serve(self, upgrade: UpgradeRow, which: str, *, force: bool = False, after: int | None = None) -> int:
        """Put the serving plan of that name in the upgrade's plan in force, once everybody is ready for it; its epoch.

        WrongPhase where another epoch than `after` was in force.
        """
        legs = [leg_from_json(leg) for leg in upgrade.plan[which]]
        served = upgrade.new_collection if which == "copying" else None
        name, times = self.gallery.name, self.hands.times
        epoch = self.registry.announce(name, legs, times, upgrade=upgrade.id, unless=served, after=after)
        told = ""
        while waiting := self.registry.activate(self.gallery.name, epoch, force=force, upgrade=upgrade.id):
            if waiting[0] != told:
                told = waiting[0]
                self.say(f"epoch {epoch} waits: {told}")
            self._check_stop()
            self.stop.wait(0.1)
        return epoch

    # --- the original kept whole --------------------------------------------------------------------------------------

    def _mirror(self, upgrade: UpgradeRow) -> Mirror:
        name = f"{upgrade.id}:{uuid.uuid4().hex[:8]}"
        writes = Writes(self.gallery.name, registry=self.registry, name=name, longest_call=self.hands.longest_call)
        assert upgrade.original is not None  # noqa: S101 (the caller looked)
        lift = functools.partial(self._lifted, upgrade.lift, upgrade.plan["question"]["side"]) if upgrade.lift else None
        done = functools.partial(self._last_done, upgrade)
        return Mirror(upgrade.original, store=self.store, writes=writes, done=done, page=COPIED_AT_ONCE, lift=lift)

    def _last_done(self, upgrade: UpgradeRow, ids: Sequence[Id]) -> dict[Id, str]:
        kinds = self.registry.last_done(upgrade.id, ids)
        return {id: kinds[key(id)] for id in ids if key(id) in kinds}

    def _lifted(self, lift: str, side: str | None, records: Sequence[Record]) -> Vectors:
        """What h makes of records of the original, (n, d_new)."""
        known = [record.fields.get(side) if side else None for record in records]
        return self.hands.encoder.lift(lift, np.stack(vectors_of(records)), known)

    def _copy_original(self, upgrade: UpgradeRow, *, force: bool) -> int:
        """Make the copy that is emptied in place of the original, while the original is searched and both are written.

        The epoch in which that is so: what is written in another one does not reach the copy.
        """
        copy, original = upgrade.old_collections[0], str(upgrade.original)
        self._create(copy, upgrade.to_version if upgrade.lift else upgrade.from_version, like=original)
        epoch = self._serve(upgrade, "copying", force=force)
        what = f"{'lifting' if upgrade.lift else 'copying'} {original}"
        begun = self._copied_to(upgrade.id, epoch)
        self.say(f"{what} into {copy}{', from where it stood' if begun else ''}")

        def progress(at: Position) -> None:
            self.registry.set_upgrade(upgrade.id, copying=asdict(at) | {"epoch": epoch}, baton=self._holds)
            self.report(what, at.done, at.total)

        self._mirror(upgrade).copy(copy, functools.partial(self._turn, upgrade), progress, begun)
        grace = self.registry.plan(self.gallery.name).grace
        self.say(f"{copy} holds what {original} holds; waiting {grace:g} s, until every search would see it")
        self.stop.wait(grace)
        self._check_stop()
        return epoch

    def _agree(self, upgrade: UpgradeRow) -> None:
        self._mirror(upgrade).agree(_each_once(upgrade.new_collection, *upgrade.old_collections))

    def _copied_to(self, upgrade: int, epoch: int) -> Position | None:
        """Where a copy was interrupted in this epoch; it begins anew in another one."""
        kept = dict(self.registry.upgrade(upgrade).copying or {})
        return Position(**kept) if kept.pop("epoch", None) == epoch else None

    @contextmanager
    def _turn(self, upgrade: UpgradeRow, count: int) -> Iterator[None]:
        """So many records of the original may be copied now; `rmvdb throttle` and `rmvdb pause` hold for them as for a batch."""
        worker = self._worker
        with worker.within_limits(upgrade.id, self.gallery.name, count=count, stop=self.stop) if worker else nullcontext():
            self._check_stop()
            self.registry.refuse_ended(upgrade.id)
            self.registry.refuse_overtaken(upgrade.id, self._holds)  # the copy may be being emptied by now
            yield

    def _serve_original(self, upgrade: UpgradeRow, *, force: bool) -> None:
        """All of a roll back where the original was kept."""
        self._serve(upgrade, "original", force=force)
        self._move_aliases(upgrade)
        searched = only([upgrade.new_collection])
        self.registry.set_upgrade(upgrade.id, phase=Phase.CUT_OVER, was=Phase.PLANNED, listed=True, note=searched)
        self.say(f"rolled back: {searched} now")

    # --- backfill -----------------------------------------------------------------------------------------------------

    def task(self, upgrade: UpgradeRow) -> Task:
        """The upgrade as its batches see it."""
        old = [self.registry.collection(each) for each in upgrade.old_collections]
        back = self.registry.upgrade(upgrade.undoes).old_collections if upgrade.undoes else [upgrade.new_collection]
        return Task(
            upgrade=upgrade.id,
            gallery=self.gallery.name,
            old=tuple(upgrade.old_collections),
            new=tuple(back),
            version=upgrade.to_version,
            grace=self.registry.plan(self.gallery.name).grace,
            removal_allowed=all(not each.adopted or each.removal_allowed for each in old),
            undoes=upgrade.undoes,
            stand_in=tuple(upgrade.plan.get("stand_in", ())),
            known_by=upgrade.original if upgrade.lift else None,
        )

    def list_work(self, upgrade: UpgradeRow) -> None:
        """Make the work list: batches in the order of their confidence, or of the archive for a roll back.

        The oldest collection goes first: its records are searched with the poorest queries, and gain most.
        """
        if upgrade.listed:
            return
        self.registry.discard_list(upgrade.id, baton=self._holds)  # of a listing that was interrupted
        first = self.registry.next_priority(upgrade.id)
        work = self._undone(upgrade) if upgrade.undoes else self._in_order(upgrade)
        for batches in _chunks(work, LISTED_AT_ONCE):
            self._check_stop()
            self.registry.add_batches(upgrade.id, batches, first=first, baton=self._holds)
            first += len(batches)
        self.registry.set_upgrade(upgrade.id, listed=True, note="the work list is made", baton=self._holds)

    def _in_order(self, upgrade: UpgradeRow) -> Iterator[tuple[list[Id], None]]:
        begun = self.registry.listed_ids(upgrade.id)
        self.hands.folder.mkdir(parents=True, exist_ok=True)
        counted = [(leg, self.store.count(leg.collection)) for leg in map(leg_from_json, reversed(upgrade.plan["before"]))]
        batch = min(self.hands.batch, max(LEAST_BATCH, sum(count for _, count in counted) // STEPS))
        for leg in (leg for leg, count in counted if count):
            for ids in self._ordered(upgrade, leg, begun, batch=batch):
                yield ids, None

    def _ordered(self, upgrade: UpgradeRow, leg: Leg, begun: set[Id], *, batch: int) -> Iterator[list[Id]]:
        question = Question(**upgrade.plan["question"])
        classifier = self.hands.classifier(self.registry.version(leg.model))
        name, order = self._planner().order(question, leg, classifier)
        self.say(f"listing the records of {leg.collection} in {name} order")
        return ordered(
            self.store,
            leg.collection,
            order,
            batch=batch,
            folder=self.hands.folder,
            leave_out=lambda ids: begun.intersection(ids) | self._newer(upgrade, leg.collection, ids),
            fields=[question.labels] if question.labels else [],
            progress=lambda done, total: self.report(f"listing {leg.collection}", done, total),
        )

    def _newer(self, upgrade: UpgradeRow, collection: str, ids: Sequence[Id]) -> set[Id]:
        """Those of these records that a newer old collection holds, too: each is listed once, where clients are shown it."""
        newer = itertools.takewhile(lambda each: each != collection, () if upgrade.lift else upgrade.old_collections)
        return {record.id for each in newer for record in self.store.get(each, ids, fields=())}

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

    def backfill(self, upgrade: UpgradeRow, worker: Worker, *, until: float | None = None) -> Progress:
        """Work on batches until all are retired, or the share `until` (None: that was asked for) is reached, or it is stopped."""
        return worker.run(
            self.task(upgrade),
            self._backfill(upgrade),
            until=upgrade.plan["until"] if until is None else until,
            stop=self.stop,
            progress=lambda now: self.report("backfilling", now.done, now.total),
        )

    def _switch(self, upgrade: UpgradeRow, worker: Worker, *, force: bool) -> UpgradeRow:
        """From the planned share on, let the new model alone embed the queries; until there each model does for its own leg."""
        at, plan = upgrade.plan["switch"], upgrade.plan
        if self.backfill(upgrade, worker, until=min(at, plan["until"])).t < at:
            return upgrade  # stopped, or not meant to go so far
        self._serve(upgrade, "later", force=force)
        note = f"from t = {at:g} on the new model alone embeds the queries"
        self.registry.set_upgrade(upgrade.id, plan=plan | {"serving": plan["later"], "switch": None}, note=note)
        self.say(note)
        return self.registry.upgrade(upgrade.id)

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
        """Until the old collections, counted at Strong twice and one grace apart, hold nothing but quarantined records; a lifted
        copy, nothing that is still lifted.

        Records that other programs put there meanwhile are found and moved; EngineError where they never stop coming.
        """
        old, grace = " and ".join(upgrade.old_collections), self.task(upgrade).grace
        quiet = False
        for _ in range(ROUNDS):
            if upgrade.original:
                self._agree(upgrade)
            late = sum(self._list_late(upgrade, collection) for collection in upgrade.old_collections)
            if late:
                what = "re-embedded" if upgrade.in_place else "moved"
                self.say(f"{counted(late, 'record')} came into {old} meanwhile, to be {what}, too")
                self.backfill(upgrade, worker)
            elif quiet:
                return
            else:
                what = "re-embedded" if upgrade.in_place else "empty"
                self.say(f"{old} {'is' if len(upgrade.old_collections) == 1 else 'are'} {what}; looking again in {grace:g} s")
                self._outwait_writes(grace)
            quiet = not late
            self._check_stop()
        raise errors.EngineError(
            f"Other programs keep writing into {old} ({counted(late, 'record')} since the last look); "
            "stop them, then: rmvdb cutover"
        )

    def _outwait_writes(self, grace: float) -> None:
        """One grace, and until the writes that are open now have ended: one may have found its record in old before it left."""
        writes = self.registry.open_writes(self.gallery.id)
        self.stop.wait(grace)
        while writes & self.registry.open_writes(self.gallery.id):
            self._check_stop()
            self.stop.wait(0.1)

    def _list_late(self, upgrade: UpgradeRow, collection: str) -> int:
        aside = {row.record for row in self.registry.quarantined(upgrade.id)}
        remade = self._retired(upgrade) if upgrade.in_place else None
        late = 0
        for page in self.store.scan(collection, page=self.hands.batch):
            left = [record.id for record in page if key(record.id) not in aside]
            settled = self._newer(upgrade, collection, left) if remade is None else self._remade(upgrade, left, remade)
            if ids := [id for id in left if id not in settled]:
                self.registry.add_late(upgrade.id, ids)
            late += len(ids)
        return late

    def _retired(self, upgrade: UpgradeRow) -> npt.NDArray[np.uint64]:
        """Eight bytes of each id that a batch has done with."""
        found, after = [np.empty(0, np.uint64)], 0
        while page := self.registry.batches(upgrade.id, after=after, state=BatchState.RETIRED):
            found += [hashes(unpack_ids(row.remove)) for row in page]
            after = page[-1].id
        return np.concatenate(found)

    def _remade(self, upgrade: UpgradeRow, ids: Sequence[Id], retired: npt.NDArray[np.uint64]) -> set[Id]:
        """Those of these records that have the new model's own vector, and not one that was lifted."""
        by_batches = {id for id, done in zip(ids, np.isin(hashes(ids), retired), strict=True) if done}
        return by_batches | self._last_done(upgrade, ids).keys()

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
        """Move what is left, complete, verify, then serve the new collection alone."""
        if upgrade.phase == Phase.CUT_OVER:
            self.say(f"cut over already: {only([leg.collection for leg in self.registry.plan(self.gallery.name).legs])}")
            return
        if upgrade.phase != Phase.SERVING_BOTH or not upgrade.listed:
            raise errors.WrongPhase(f"The upgrade is {upgrade.phase}; run rmvdb upgrade until its backfill is done")
        if self._left(upgrade):
            now = self.registry.progress(upgrade.id)
            if upgrade.plan["until"] < 1.0:
                raise errors.WrongPhase(
                    f"The backfill was asked to stop at {now.done} of {counted(now.total, 'record')}; "
                    "run rmvdb upgrade without --until"
                )
            self.say(f"{now.total - now.done} of {counted(now.total, 'record is', 'records are')} left to move")
            self.backfill(upgrade, worker)
        self._refuse_quarantined(upgrade)
        self.complete(upgrade, worker)
        self._refuse_quarantined(upgrade)
        self.say("verifying")
        report = self.verify(upgrade)
        if not report.ok:
            raise errors.VerifyFailed(
                f"{counted(report.problems, 'difference')}, such as: {report.examples[0]}; "
                "both collections stay in service: rmvdb verify"
            )
        self._serve(upgrade, "final", force=force)
        self._move_aliases(upgrade)
        searched = only([upgrade.new_collection])
        note = f"verified {counted(report.records, 'record')}; {searched}"
        self.registry.set_upgrade(upgrade.id, phase=Phase.CUT_OVER, was=Phase.SERVING_BOTH, note=note)
        self.say(
            f"{'rolled back' if upgrade.undoes else 'cut over'}: {counted(report.records, 'record')} verified, {searched} now"
        )

    def _move_aliases(self, upgrade: UpgradeRow) -> None:
        """Other programs find the records by the names that they know."""
        moved = [alias for each in upgrade.leaving for alias in self.store.move_aliases(each, upgrade.new_collection)]
        if moved:
            what = f"the alias {moved[0]} now stands" if len(moved) == 1 else f"the aliases {', '.join(moved)} now stand"
            self.say(f"{what} for {upgrade.new_collection}")

    def _left(self, upgrade: UpgradeRow) -> bool:
        """Whether a batch is not retired yet."""
        return bool(self.registry.counts(upgrade.id).keys() - {BatchState.RETIRED})

    def _refuse_quarantined(self, upgrade: UpgradeRow) -> None:
        if self.registry.quarantined(upgrade.id):
            self._release_deleted(upgrade)
        if aside := self.registry.quarantined(upgrade.id):
            raise errors.WrongPhase(
                f"{counted(len(aside), 'record is', 'records are')} quarantined, such as {aside[0].record!r} "
                f"({aside[0].reason}); what is quarantined stays findable in its old collection: "
                "rmvdb quarantine list, then retry or drop, then rmvdb cutover"
            )

    def _release_deleted(self, upgrade: UpgradeRow) -> None:
        """Whoever deleted a quarantined record meanwhile has settled what was to become of it."""
        if upgrade.original:
            self._agree(upgrade)
        numbers = self.registry.collection(upgrade.old_collections[0]).schema["id_type"] == IdType.INT64
        left: set[Id] = {int(row.record) if numbers else row.record for row in self.registry.quarantined(upgrade.id)}
        for collection in upgrade.old_collections:
            left -= {record.id for record in self.store.get(collection, list(left), fields=())}
        self.registry.release(upgrade.id, list(left), again=False)

    def clean_up(self, upgrade: UpgradeRow) -> None:
        """Drop the old collections, the archive, the work list and the intents; there is no way back from here.

        After a roll back of an upgrade that had superseded another, that other one goes on.
        """
        if upgrade.phase == Phase.CUT_OVER:
            self._wait_since(upgrade, Phase.CUT_OVER)
            self._refuse_late(upgrade)
        self.registry.begin_clean_up(upgrade.id)
        if upgrade.original and upgrade.undoes is None:
            self._serve(upgrade, "alone")
        dropped = upgrade.leaving
        for collection in dropped:
            self.store.drop(collection)
            self.registry.mark_dropped(collection)
        done = self._ended_with(upgrade)
        for each in done:
            self.hands.archive.clear(self.gallery.name, str(each.id))
        note = f"{' and '.join(dropped)} and the archive are gone"
        resume = done[-1].supersedes if upgrade.undoes else None
        self.registry.end(*(each.id for each in done), note=note, resume=resume)
        self._say_ended(note, resume)

    def _refuse_late(self, upgrade: UpgradeRow) -> None:
        there = [collection for collection in upgrade.leaving if self.store.exists(collection)]  # another clean-up may be further
        if upgrade.original:  # a roll back leaves what it leads back from as it is
            late = {each: self._late_in_original(upgrade) for each in there if each == upgrade.original}
        else:
            late = {collection: self.store.count(collection) for collection in there}
        if found := next(filter(late.get, late), None):
            collection, left = found, late[found]
            raise errors.WrongPhase(
                f"{counted(left, 'record')} came into {collection!r} after cut-over; write such records through rmvdb's client, "
                "remove them there, then clean up again"
            )

    def _late_in_original(self, upgrade: UpgradeRow) -> int:
        """How many records other programs put there; the insertion of a client that was killed in it is none of them."""
        late = 0
        for ids in self._mirror(upgrade).unknown([upgrade.new_collection]):
            announced = self.registry.announced(upgrade.id, ids).values()
            late += len(ids) - sum(not intent.done for intent in announced)
        return late

    def _ended_with(self, upgrade: UpgradeRow) -> list[UpgradeRow]:
        """The upgrade and those that are over with it: what it undid, or whose place it took, and so on."""
        ended = [upgrade]
        if upgrade.undoes is not None:
            return [upgrade, self.registry.upgrade(upgrade.undoes)]
        while (before := ended[-1].supersedes) is not None:
            ended.append(self.registry.upgrade(before))
        return ended

    def _say_ended(self, note: str, resume: int | None) -> None:
        self.say(note)
        if resume is not None:
            row = self.registry.upgrade(resume)
            self.say(f"the upgrade from {row.from_version} to {row.to_version} is on again: rmvdb upgrade, or rmvdb rollback")

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
            if self._abandon(upgrade):
                return None
            self.deploy(upgrade)  # its plan is in force already: only its phase does not say so yet
            upgrade = self.registry.upgrade(upgrade.id)
        if upgrade.original:
            return self._back_to_original(upgrade)
        new, *old = (leg_from_json(leg) for leg in upgrade.plan["serving"])
        final = upgrade.plan["before"]
        stand_in = old[0].beyond(new) or ()
        if self._can_load(old[0].model):
            old[0] = replace(old[0], write_with=old[0].model)  # what is written there while rolling back is v1's own, not ψ's
        elif upgrade.method != Method.NAIVE:  # the new model goes on embedding the queries
            final = _to_json(old if len(old) > 1 else [replace(old[0], calibration=None)])
        self.say(f"rolling back to {upgrade.from_version}")
        return self._undo(
            upgrade,
            old_collections=[upgrade.new_collection],
            new_collection=upgrade.old_collections[0],
            order="archive",
            # The collection that records leave comes last: who reads one after the other reads there first.
            plan={"until": 1.0, "cutover": True, "serving": _to_json([*old, new]), "final": final, "stand_in": stand_in},
        )

    def _back_to_original(self, upgrade: UpgradeRow) -> UpgradeRow:
        self.say(f"rolling back to {upgrade.from_version}, which {upgrade.original} was kept for")
        return self._undo(
            upgrade,
            old_collections=_each_once(upgrade.new_collection, *upgrade.old_collections),
            new_collection=upgrade.original,
            order="none",
            plan={"until": 1.0, "cutover": True, "original": upgrade.plan["original"]},
        )

    def _undo(self, upgrade: UpgradeRow, **values: Any) -> UpgradeRow:
        return self.registry.supersede(
            upgrade.id,
            epoch=self.registry.plan(self.gallery.name).epoch,
            note=f"a roll back to {upgrade.from_version} takes its place",
            gallery_id=self.gallery.id,
            from_version=upgrade.to_version,
            to_version=upgrade.from_version,
            undoes=upgrade.id,
            phase=Phase.PLANNED,
            method=upgrade.method,
            **values,
        )

    def _abandon(self, upgrade: UpgradeRow) -> bool:
        note, made = "nothing had been deployed; the upgrade is given up", [upgrade.new_collection]
        if upgrade.original and self.registry.plan(self.gallery.name).legs[0].collection != upgrade.new_collection:
            self._serve(upgrade, "untouched")  # no client writes to the copy any more
            made = _each_once(*made, *upgrade.old_collections)
        if not self.registry.abandon(upgrade.id, note=note):
            return False
        for collection in made:
            if self.store.exists(collection) and self._is_ours(collection):
                self.store.drop(collection)
                self.registry.mark_dropped(collection)
        self._say_ended(note, upgrade.supersedes)
        return True

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
        with self._leading(upgrade, worker):
            self._advance(upgrade, worker, force=force)
        return self.registry.upgrade(upgrade.id)

    def launch(self, upgrade: UpgradeRow, worker: Worker, *, force: bool = False) -> None:
        """Deploy, and leave the rest to workers; returns once it is deployed, though a worker may have been faster."""
        while self.registry.upgrade(upgrade.id).phase == Phase.PLANNED:
            try:
                with self._leading(upgrade, worker):
                    self.deploy(self.registry.upgrade(upgrade.id), force=force)
            except errors.UpgradeRunning as exc:
                log.info("%s", exc)
                self.stop.wait(1.0)
                self._check_stop()

    @contextmanager
    def _leading(self, upgrade: UpgradeRow, worker: Worker) -> Iterator[None]:
        """Hold the baton, and note what goes wrong."""
        with self._baton(upgrade, worker):
            try:
                yield
            except errors.RmvdbError as exc:
                self.registry.refuse_ended(upgrade.id)  # whatever failed did so because another upgrade took the place
                self.registry.set_upgrade(upgrade.id, reason=str(exc), baton=self._holds)
                raise
            self.registry.set_upgrade(upgrade.id, reason="")

    def _advance(self, upgrade: UpgradeRow, worker: Worker, *, force: bool) -> None:
        self.deploy(upgrade, force=force)
        upgrade = self.registry.upgrade(upgrade.id)
        if upgrade.phase != Phase.SERVING_BOTH:
            return
        self.list_work(upgrade)
        upgrade = self.registry.upgrade(upgrade.id)
        if upgrade.plan.get("switch") is not None:
            upgrade = self._switch(upgrade, worker, force=force)
        self.backfill(upgrade, worker)
        wanted = upgrade.plan["cutover"] and upgrade.plan["until"] >= 1.0  # a share of it may be all: batches are whole
        if wanted and not self._left(upgrade) and not self.stop.is_set():
            self.cut_over(upgrade, worker, force=force)

    @contextmanager
    def _baton(self, upgrade: UpgradeRow, worker: Worker) -> Iterator[None]:
        """Be the one process that makes batches and changes phases; UpgradeRunning where another is."""
        self._holds = baton = self._taken_baton(upgrade, worker)
        self._worker, ended = worker, threading.Event()

        def hold() -> None:
            while not ended.wait(BATON / 4):
                try:
                    self.registry.keep_leading(upgrade.id, baton, BATON)
                except errors.RmvdbError as exc:
                    log.warning("The baton could not be held: %s", exc, extra={"action": "baton"})

        holder = threading.Thread(target=hold, name="rmvdb-baton", daemon=True)
        holder.start()
        try:
            yield
        finally:
            ended.set()
            holder.join()
            self._holds = self._worker = None
            worker.leave()
            self.registry.keep_leading(upgrade.id, baton, 0)

    def _taken_baton(self, upgrade: UpgradeRow, worker: Worker) -> int:
        """Wait for the baton of a conductor that is silent, as after a kill; refuse at the first sign that it lives."""
        seen: float | None = None
        while (baton := self.registry.lead(upgrade.id, worker.name, BATON)) is None:
            row = self.registry.upgrade(upgrade.id)
            if seen is None:
                seen = row.conductor_until
                self.say(f"{row.conductor} has this upgrade; taking over if it is silent for {BATON:g} s")
            elif row.conductor_until != seen:
                raise errors.UpgradeRunning(f"{row.conductor} is at work on this upgrade; watch it with rmvdb status --watch")
            self._check_stop()
            self.stop.wait(0.2)
        return baton

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise errors.Stopped("Stopped; the same command goes on from here")


def _leg_of(version: VersionRow, collection: str) -> Leg:
    """A collection of vectors of this version, asked with its own queries."""
    return Leg(
        collection=collection,
        model=version.name,
        metric=Metric(version.metric),
        embedder=version.base or version.name,
        transforms=(version.head,) if version.head else (),
    )


def _led(leg: Leg, newest: Leg, new: Leg, reverse: str) -> Leg:
    """An old leg with the new model's queries, by ψ and what leads on from there; as it is where nothing leads to it."""
    rest = leg.beyond(newest)
    return leg if rest is None else replace(leg, embedder=new.embedder, transforms=(*new.transforms, reverse, *rest))


def _calibrated(new: Leg, old: Sequence[Leg], calibrations: Sequence[str | None]) -> list[Leg]:
    """The new leg, then the old ones; the calibrations are in a plan's order, that of the new one last."""
    *scales, last = calibrations
    return [replace(leg, calibration=scale) for leg, scale in zip((new, *old), (last, *scales), strict=True)]


def _each_once(*names: str) -> list[str]:
    return list(dict.fromkeys(names))


def _to_json(legs: Sequence[Leg]) -> list[dict[str, Any]]:
    return [leg_to_json(leg) for leg in legs]


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
