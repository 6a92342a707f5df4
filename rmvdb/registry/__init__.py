"""The model-version registry and the work list, in SQL (SQLite or PostgreSQL). The only room that writes a statement.

Every method is one transaction, repeated with back-off while the database is away. Times are the database's clock. Rows come
back detached: they are what was true then.
"""

from __future__ import annotations

import base64
import functools
import json
import sqlite3
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    Float,
    LargeBinary,
    Select,
    and_,
    case,
    create_engine,
    delete,
    event,
    func,
    insert,
    inspect,
    make_url,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DisconnectionError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import ORMExecuteState, Session
from sqlalchemy.sql.functions import GenericFunction
from tenacity import RetryCallState, Retrying, stop_after_delay, wait_random_exponential

from rmvdb import errors, files
from rmvdb.addresses import without_password
from rmvdb.tables import (
    KEPT,
    PASSING,
    ArtifactRow,
    BatchRow,
    ClientRow,
    CollectionRow,
    GalleryRow,
    IntentRow,
    PhaseRow,
    PlanRow,
    QuarantineRow,
    Table,
    TrafficRow,
    UpgradeRow,
    VersionRow,
    WorkerRow,
)
from rmvdb.types import BatchState, Id, IdType, Leg, Metric, Phase, Progress, Schema, ServingPlan
from rmvdb.types import Field as SchemaField

P = ParamSpec("P")
R = TypeVar("R")
Named = TypeVar("Named", VersionRow, GalleryRow, CollectionRow)
#: Gives those columns of a new upgrade that depend on its number.
Details: TypeAlias = Callable[[int], Mapping[str, Any]]
#: What the manifest holds: rows as JSON values, by table.
Contents: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]

#: Batches that a worker is copying, or has left at it: another one goes on.
COPYING = (BatchState.CLAIMED, BatchState.WRITING)
#: Batches that a worker is at, or has left.
BEGUN = (*COPYING, BatchState.REMOVING)
#: Seconds for which new writes and claims wait while an epoch changes; renewed by every try, so a dead conductor holds nobody up.
CLOSING = 5.0
#: Seconds after which a write counts as long, and for which an epoch lets others write on while it waits for the long ones.
LONG, LINGER = 1.0, 60.0
#: A claim under which nothing was written, nor under one before it.
_UNWRITTEN = and_(BatchRow.state == BatchState.CLAIMED, BatchRow.archive.is_(None), BatchRow.copied_at.is_(None))
#: In PostgreSQL, whoever hands on the contents holds this advisory lock, so that the last one to do so has seen all others.
KEEPING = 0x726D766463
#: Of so many records of a gallery it is kept how often they are found; where there are more, those go that weigh least.
MOST_FOUND = 100_000
#: A find weighs half as much as one so many seconds later. Weights are 2^(seconds since the second number / half-life), which a
#: float holds for 80 years. Forward decay: Cormode et al., ICDE 2009.
HALF_LIFE, FADING_SINCE = 30 * 86400.0, 1.76e9
#: Batches whose records are found in the new collection.
MOVED = (BatchState.COPIED, BatchState.REMOVING, BatchState.RETIRED)


class clock(GenericFunction[float]):  # noqa: N801 (an SQL function is written in lower case)
    """Seconds since 1970 by the database's clock, to a fraction of a millisecond."""

    type = Float(53)
    inherit_cache = True


@compiles(clock, "sqlite")
def _sqlite_clock(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(clock, "postgresql")
def _postgres_clock(*_: Any, **__: Any) -> str:
    return "extract(epoch from clock_timestamp())::float8"


def key(id: Id) -> str:
    """How a record's id is written in a row of its own."""
    return str(id)


def pack_ids(ids: Iterable[Id]) -> bytes:
    """Ids of one kind as bytes, in order; about four bytes an INT64 id."""
    return zlib.compress(json.dumps(list(ids), ensure_ascii=False).encode())


def unpack_ids(packed: bytes | None) -> list[Id]:
    """The inverse of `pack_ids`; nothing for None."""
    return list(json.loads(zlib.decompress(packed))) if packed else []


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """A schema as JSON values."""
    plain = {name: getattr(schema, name) for name in Schema.__slots__}
    return plain | {"fields": [{"name": each.name, "type": each.type, "params": dict(each.params)} for each in schema.fields]}


def schema_from_json(value: Mapping[str, Any]) -> Schema:
    """The inverse of `schema_to_json`."""
    fields = tuple(SchemaField(**each) for each in value["fields"])
    return Schema(**{**value, "fields": fields, "metric": Metric(value["metric"]), "id_type": IdType(value["id_type"])})


def leg_to_json(leg: Leg) -> dict[str, Any]:
    """A leg as JSON values."""
    return {name: getattr(leg, name) for name in Leg.__slots__} | {"transforms": list(leg.transforms)}


def leg_from_json(value: Mapping[str, Any]) -> Leg:
    """The inverse of `leg_to_json`."""
    return Leg(**{**value, "metric": Metric(value["metric"]), "transforms": tuple(value["transforms"])})


def transaction(method: Callable[Concatenate[Registry, Session, P], R]) -> Callable[Concatenate[Registry, P], R]:
    """Run the method in one transaction, again with back-off while the database is away, its errors translated."""

    @functools.wraps(method)
    def run(self: Registry, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            for attempt in self._attempts():
                with attempt, _Session(self.engine, expire_on_commit=False) as session, session.begin():
                    result = method(self, session, *args, **kwargs)
                    self._keep(session)
                    return result
        except _Away as away:
            raise errors.RegistryUnavailable(
                f"The registry at {self.shown_url} did not answer for {self.patience:g} s ({away}); "
                "start it or mend registry.url, then run the same command again"
            ) from away.__cause__
        raise AssertionError("tenacity ends in a result or an exception")

    return run


class _Away(Exception):
    """The database cannot be reached, or is locked; worth another try."""


class _Session(Session):
    """A session that knows whether it changed what the manifest holds, however it was changed."""

    changed = False


@event.listens_for(_Session, "after_flush")
def _flushed(session: _Session, _: object) -> None:
    rows = (*session.new, *session.deleted, *filter(_is_changed, session.dirty))
    session.changed |= any(isinstance(row, KEPT) for row in rows)


def _is_changed(row: object) -> bool:
    """In any other column than those that the manifest leaves out."""
    return any(column.history.has_changes() for column in inspect(row).attrs if column.key not in PASSING)


@event.listens_for(_Session, "do_orm_execute")
def _executed(state: ORMExecuteState) -> None:
    mapper = state.bind_mapper
    if not state.is_select and mapper is not None and mapper.class_ in KEPT and isinstance(state.session, _Session):
        state.session.changed = True


def _worth_another_try(attempt: RetryCallState) -> bool:
    failure = attempt.outcome.exception() if attempt.outcome else None
    # Two that register the same name at once both find it free; the second one finds the first one's row when it looks again.
    return isinstance(failure, _Away) or (isinstance(failure, IntegrityError) and attempt.attempt_number < 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What a client learns when it asks: the plan in force, and the one that is announced."""

    plan: ServingPlan
    next: ServingPlan | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A client's intents, and the plan that they were made under."""

    plan: ServingPlan
    intents: tuple[int, ...]
    upgrade: int | None


class Registry:
    """One database. `patience`: seconds for which a call keeps trying while the database is away.

    `keep` is given the contents within every transaction that changed them, before it is committed: what it keeps is never
    behind the registry, and what it raises undoes the change.
    """

    def __init__(self, url: str, *, patience: float = 20.0, keep: Callable[[Contents], None] | None = None) -> None:
        self.url = parsed_url(url)
        self.patience = patience
        self._keeper = keep
        self.engine = _engine(self.url.render_as_string(hide_password=False))

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return without_password(self.url.render_as_string(hide_password=False))

    def close(self) -> None:
        """Give the connections back."""
        self.engine.dispose()

    def _attempts(self) -> Retrying:
        return Retrying(
            retry=_worth_another_try,
            wait=wait_random_exponential(multiplier=0.05, max=2),
            stop=stop_after_delay(self.patience),
            reraise=True,
        )

    def _keep(self, s: _Session) -> None:
        if self._keeper is None:
            return
        s.flush()
        if s.changed:
            if s.get_bind().dialect.name == "postgresql":  # in SQLite the transaction, which began IMMEDIATE, is the lock
                s.execute(select(func.pg_advisory_xact_lock(KEEPING)))
            self._keeper(_contents(s))

    @transaction
    def now(self, s: Session, /) -> float:
        """The database's clock."""
        return s.scalar(select(clock())) or 0.0

    # --- what the manifest holds --------------------------------------------------------------------------------------

    @transaction
    def contents(self, s: Session, /) -> Contents:
        """What the manifest holds; `restore` takes it back."""
        return _contents(s)

    @transaction
    def restore(self, s: Session, /, contents: Contents) -> None:
        """Fill an empty registry, AlreadyExists for another one; every gallery is `rebuilding` until `rebuilt` is called.

        Each gallery is served by the plan that was in force, at an epoch after every one that a client may have seen.
        """
        if any(s.execute(select(table).limit(1)).first() for table in KEPT):
            raise errors.AlreadyExists(
                f"The registry at {self.shown_url} is not empty; remove its file, or drop its tables, to have it rebuilt"
            )
        for table in KEPT:
            _insert(s, table, contents.get(table.__tablename__, ()))
        for gallery in s.scalars(select(GalleryRow)):
            newest = s.scalar(select(func.max(PlanRow.epoch)).where(PlanRow.gallery_id == gallery.id)) or 0
            served = _row_of_plan(s, gallery, gallery.epoch)
            times = {name: getattr(served, name) for name in ("max_age", "longest_search", "staleness")}
            s.add(_plan_row(gallery, newest + 1, [leg_from_json(leg) for leg in served.legs], times, at=_now(s)))
            gallery.epoch, gallery.next_epoch, gallery.rebuilding = newest + 1, None, True
        for upgrade in s.scalars(select(UpgradeRow).where(UpgradeRow.phase != Phase.ENDED)):
            upgrade.listed = upgrade.phase == Phase.CUT_OVER
            s.add(PhaseRow(upgrade_id=upgrade.id, at=_now(s), phase=upgrade.phase, note="brought back by registry rebuild"))

    @transaction
    def add_copied(
        self, s: Session, /, upgrade_id: int, ids: Sequence[Id], archive: Mapping[str, Any], *, retired: bool, priority: int
    ) -> None:
        """Note a batch that was copied, now, or `retired` too, and the file with what its records were; none is noted twice."""
        there = select(BatchRow.id).where(BatchRow.upgrade_id == upgrade_id, BatchRow.priority == priority)
        if s.scalar(there) is None:
            row = _batch(upgrade_id, priority, ids, None)
            row.archive, row.copied_at = dict(archive), None if retired else _now(s)
            row.state, row.remove = (BatchState.RETIRED, row.ids) if retired else (BatchState.COPIED, None)
            s.add(row)

    @transaction
    def add_written(self, s: Session, /, upgrade_id: int, ids: Sequence[Id]) -> None:
        """Note that clients wrote these records in the upgrade, as done intents that end now."""
        gallery, now = s.scalars(_gallery_of(upgrade_id)).one(), _now(s)
        same = {"gallery_id": gallery.id, "upgrade_id": upgrade_id, "kind": "upsert", "done": True, "epoch": gallery.epoch}
        same |= {"client": "rebuilt", "opened_at": now, "deadline": now, "done_at": now}
        if ids:
            s.execute(insert(IntentRow), [same | {"record": key(id)} for id in ids])

    @transaction
    def forget_work(self, s: Session, /, upgrade_id: int) -> None:
        """Forget the work list, intents and quarantine of an upgrade, so that they can be made again."""
        _forget_work(s, [upgrade_id])

    @transaction
    def rebuilt(self, s: Session, /, gallery_id: int) -> None:
        """The work of a gallery is whole again: writes, claims and conductors go on."""
        s.get_one(GalleryRow, gallery_id).rebuilding = False

    # --- model versions and artifacts ---------------------------------------------------------------------------------

    @transaction
    def add_version(self, s: Session, /, **values: Any) -> VersionRow:
        """Register a model version; the same again is no error, another one of that name is AlreadyExists."""
        there = s.scalar(select(VersionRow).where(VersionRow.name == values["name"]))
        if there is None:
            there = VersionRow(**values, created_at=_now(s))
            s.add(there)
            s.flush()
        elif differing := [name for name in values if name != "probes" and getattr(there, name) != values[name]]:
            raise errors.AlreadyExists(
                f"Model version {there.name!r} is registered with another {differing[0]}; choose another name"
            )
        return there

    @transaction
    def version(self, s: Session, /, name: str) -> VersionRow:
        """One model version; UnknownName offers the nearest."""
        return _named(
            s, VersionRow, "model version", name, hint="register one: rmvdb model add NAME --embedder package.module:object"
        )

    @transaction
    def versions(self, s: Session, /) -> Sequence[VersionRow]:
        """All model versions, oldest first."""
        return s.scalars(select(VersionRow).order_by(VersionRow.id)).all()

    @transaction
    def remove_version(self, s: Session, /, name: str) -> None:
        """Forget a model version; UsageError where a gallery, its history, or another version has need of it."""
        row = _named(s, VersionRow, "model version", name)
        if gallery := s.scalar(_galleries_with(name)):
            raise errors.UsageError(
                f"Model version {name!r} is part of gallery {gallery!r} or its history; forget that first: "
                f"rmvdb gallery remove {gallery}"
            )
        needs = or_(VersionRow.base == name, VersionRow.compatible_with == name)
        if other := s.scalar(select(VersionRow.name).where(needs)):
            raise errors.UsageError(f"Model version {other!r} refers to {name!r}; forget that first: rmvdb model remove {other}")
        s.delete(row)

    @transaction
    def add_artifact(self, s: Session, /, *, sha256: str, kind: str, suffix: str, size: int) -> None:
        """Register a file; the same again is no error."""
        if s.get(ArtifactRow, sha256) is None:
            s.add(ArtifactRow(sha256=sha256, kind=kind, suffix=suffix, size=size, created_at=_now(s)))

    @transaction
    def artifact(self, s: Session, /, sha256: str) -> ArtifactRow:
        """One artifact's row."""
        row = s.get(ArtifactRow, sha256)
        if row is None:
            raise errors.ArtifactError(f"Artifact {sha256} is not in the registry; restore the registry from its backup")
        return row

    # --- galleries and serving plans ----------------------------------------------------------------------------------

    @transaction
    def add_gallery(
        self,
        s: Session,
        /,
        *,
        name: str,
        model: str,
        schema: Schema,
        adopted: bool,
        source: str | None,
        search: Mapping[str, Any],
        times: Mapping[str, float],
    ) -> GalleryRow:
        """Register a gallery of one collection, which alone serves it at epoch 1; AlreadyExists if a name is taken."""
        if s.scalar(select(GalleryRow).where(GalleryRow.name == name)):
            raise errors.AlreadyExists(f"Gallery {name!r} exists; see it with: rmvdb gallery show {name}")
        if holder := s.scalar(select(CollectionRow).where(CollectionRow.name == schema.collection)):
            raise errors.AlreadyExists(
                f"Collection {schema.collection!r} belongs to gallery {s.get_one(GalleryRow, holder.gallery_id).name!r} already"
            )
        version = _named(s, VersionRow, "model version", model)
        gallery = GalleryRow(name=name, id_type=schema.id_type, source=source, epoch=1, created_at=_now(s))
        s.add(gallery)
        s.flush()
        s.add(_collection(gallery, model, schema, search, adopted=adopted, at=_now(s)))
        leg = Leg(
            collection=schema.collection,
            model=model,
            metric=Metric(version.metric),
            embedder=version.base or model,
            transforms=(version.head,) if version.head else (),
        )
        s.add(_plan_row(gallery, gallery.epoch, [leg], times, at=_now(s)))
        return gallery

    @transaction
    def gallery(self, s: Session, /, name: str) -> GalleryRow:
        """One gallery; UnknownName offers the nearest."""
        return _named(s, GalleryRow, "gallery", name, hint="make one: rmvdb gallery add NAME --model VERSION")

    @transaction
    def set_source(self, s: Session, /, gallery: str, source: str) -> None:
        """Change where a gallery's items come from."""
        _named(s, GalleryRow, "gallery", gallery).source = source

    @transaction
    def galleries(self, s: Session, /) -> Sequence[GalleryRow]:
        """All galleries, oldest first."""
        return s.scalars(select(GalleryRow).order_by(GalleryRow.id)).all()

    @transaction
    def refuse_used(self, s: Session, /, gallery: str) -> None:
        """UpgradeRunning where the gallery is in an upgrade, UsageError where a client serves it."""
        _refuse_used(s, _named(s, GalleryRow, "gallery", gallery))

    @transaction
    def remove_gallery(self, s: Session, /, gallery: str) -> None:
        """Forget a gallery with its plans, upgrades and history; raises what `refuse_used` does."""
        row = _named(s, GalleryRow, "gallery", gallery, lock=_FOR_CHANGE)
        _refuse_used(s, row)
        upgrades = s.scalars(select(UpgradeRow.id).where(UpgradeRow.gallery_id == row.id)).all()
        _forget_work(s, upgrades)
        s.execute(delete(PhaseRow).where(PhaseRow.upgrade_id.in_(upgrades)))
        for table in (UpgradeRow, IntentRow, PlanRow, CollectionRow, ClientRow, TrafficRow):
            s.execute(delete(table).where(table.gallery_id == row.id))
        s.delete(row)

    @transaction
    def add_collection(self, s: Session, /, gallery_id: int, *, model: str, schema: Schema, search: Mapping[str, Any]) -> None:
        """Register a collection that rmvdb made; the same again is no error."""
        if s.scalar(select(CollectionRow).where(CollectionRow.name == schema.collection)) is None:
            s.add(_collection(s.get_one(GalleryRow, gallery_id), model, schema, search, adopted=False, at=_now(s)))

    @transaction
    def collection(self, s: Session, /, name: str) -> CollectionRow:
        """One collection's row."""
        return _named(s, CollectionRow, "collection", name)

    @transaction
    def collections(self, s: Session, /, gallery_id: int) -> Sequence[CollectionRow]:
        """The collections of a gallery, dropped ones too, oldest first."""
        return s.scalars(select(CollectionRow).where(CollectionRow.gallery_id == gallery_id).order_by(CollectionRow.id)).all()

    @transaction
    def allow_removal(self, s: Session, /, name: str) -> None:
        """Note that its owner agreed to removals from an adopted collection."""
        s.execute(update(CollectionRow).where(CollectionRow.name == name).values(removal_allowed=True))

    @transaction
    def mark_dropped(self, s: Session, /, name: str) -> None:
        """Note that a collection is gone."""
        s.execute(update(CollectionRow).where(CollectionRow.name == name).values(dropped_at=clock()))

    @transaction
    def plan(self, s: Session, /, gallery: str) -> ServingPlan:
        """The serving plan in force."""
        row = _named(s, GalleryRow, "gallery", gallery)
        return _plan(s, row, row.epoch)

    @transaction
    def refresh(
        self,
        s: Session,
        /,
        gallery: str,
        *,
        client: str,
        ready: int,
        trouble: str,
        holds: int = 0,
        searches: int = 0,
        p99_ms: float = 0.0,
    ) -> Serving:
        """Tell which epoch this client serves by (0 for none yet) and can serve, and how its searches fare; learn the plan in
        force and the one that is announced."""
        # Locked, so that no epoch changes before everybody can read what this client was told.
        row = _named(s, GalleryRow, "gallery", gallery, lock={"read": True})
        told = {"epoch": holds or row.epoch, "ready": ready, "trouble": trouble, "searches": searches, "p99_ms": p99_ms}
        values = {"gallery_id": row.id, "seen_at": clock(), **told}
        if not s.execute(update(ClientRow).where(ClientRow.id == client).values(**values)).rowcount:  # type: ignore[attr-defined]
            s.execute(insert(ClientRow).values(id=client, **values))
        upcoming = _plan(s, row, row.next_epoch) if row.next_epoch else None
        return Serving(plan=_plan(s, row, row.epoch), next=upcoming)

    @transaction
    def leave(self, s: Session, /, client: str) -> None:
        """A client that ends well says so, and nobody waits for it."""
        s.execute(delete(ClientRow).where(ClientRow.id == client))

    @transaction
    def clients(self, s: Session, /, gallery_id: int) -> Sequence[ClientRow]:
        """The clients seen within their plan's maximum age."""
        return s.scalars(_live_clients(s, s.get_one(GalleryRow, gallery_id))).all()

    @transaction
    def slowest_client(self, s: Session, /, gallery: str, *, enough: int, within: float) -> ClientRow | None:
        """The client with the worst p99, of those seen within so many seconds whose p99 is one of `enough` searches."""
        mine = ClientRow.gallery_id == _named(s, GalleryRow, "gallery", gallery).id
        # Not only those seen within their plan's maximum age: where searches are slow, heartbeats come late, too.
        judged = select(ClientRow).where(mine, ClientRow.searches >= enough, ClientRow.seen_at > clock() - within)
        return s.scalar(judged.order_by(ClientRow.p99_ms.desc()).limit(1))

    @transaction
    def add_traffic(self, s: Session, /, gallery: str, found: Mapping[Id, int]) -> None:
        """Add how often searches found these records lately; of at most `MOST_FOUND` of a gallery it is kept."""
        mine = _named(s, GalleryRow, "gallery", gallery).id
        one = 2 ** ((_now(s) - FADING_SINCE) / HALF_LIFE)
        # In one order, so that two clients never wait for each other.
        rows = [{"gallery_id": mine, "record": key(id), "weight": found[id] * one} for id in sorted(found, key=key)]
        kind = postgresql if s.get_bind().dialect.name == "postgresql" else sqlite
        upsert = kind.insert(TrafficRow.__table__)  # the table itself: twice as fast as by its class
        sums = {"weight": TrafficRow.weight + upsert.excluded.weight}
        s.execute(upsert.on_conflict_do_update(index_elements=["gallery_id", "record"], set_=sums), rows)
        _forget_rarest(s, mine)

    @transaction
    def traffic(self, s: Session, /, gallery_id: int) -> dict[str, float]:
        """How much the finds of each record weigh, by key."""
        rows = s.execute(select(TrafficRow.record, TrafficRow.weight).where(TrafficRow.gallery_id == gallery_id))
        return {row.record: row.weight for row in rows}

    @transaction
    def announce(
        self,
        s: Session,
        /,
        gallery: str,
        legs: Sequence[Leg],
        times: Mapping[str, float],
        *,
        upgrade: int | None = None,
        unless: str | None = None,
        after: int | None = None,
    ) -> int:
        """Write the next plan and let the clients prepare for it; the epoch it will have. The same legs again: the same epoch.

        `upgrade` is the one that asks: WrongPhase where it has ended, for another decides what is served by now; WrongPhase, too,
        where the collection `unless` is served first already, or another epoch than `after` is in force.
        """
        row = _named(s, GalleryRow, "gallery", gallery, lock=_FOR_CHANGE)
        _refuse_ended(s, upgrade)
        if _plan(s, row, row.epoch).legs[0].collection == unless:
            raise errors.WrongPhase(f"Collection {unless!r} is served already; see rmvdb status")
        if after not in (None, row.epoch):
            raise errors.WrongPhase(f"Gallery {gallery!r} is served differently since; run the same command again")
        if row.next_epoch and _legs(s, row, row.next_epoch) == list(legs):
            return row.next_epoch
        if _legs(s, row, row.epoch) == list(legs):
            row.next_epoch, row.closing_until = None, None
            return row.epoch
        newest = s.scalar(select(func.max(PlanRow.epoch)).where(PlanRow.gallery_id == row.id)) or 0
        row.next_epoch = newest + 1
        s.add(_plan_row(row, row.next_epoch, legs, times, at=_now(s)))
        return row.next_epoch

    @transaction
    def activate(self, s: Session, /, gallery: str, epoch: int, *, force: bool = False, upgrade: int | None = None) -> list[str]:
        """Put the announced plan in force, or say who is not ready: an epoch changes only when older writes and claims have ended
        and every live client can serve the next plan (`force` leaves the clients out)."""
        row = _named(s, GalleryRow, "gallery", gallery, lock=_FOR_CHANGE)
        _refuse_ended(s, upgrade)
        if row.epoch == epoch:
            return []
        if row.next_epoch != epoch:
            announced = f", which is {row.next_epoch}" if row.next_epoch else "; none is"
            raise errors.WrongPhase(f"Plan epoch {epoch} of gallery {gallery!r} is not the announced one{announced}")
        if waiting := ([] if force else _unready(s, row, epoch)):
            return waiting
        if row.rebuilding:
            return ["its registry is being rebuilt"]
        if waiting := _claimed(s, row) or _lingering(s, row, epoch):
            return waiting
        # From here on new writes and claims wait, so that the open ones come to an end under steady load.
        row.closing_until = _now(s) + CLOSING
        if waiting := _writing(s, row):
            return waiting
        row.epoch, row.next_epoch, row.closing_until = epoch, None, None
        return []

    # --- upgrades -----------------------------------------------------------------------------------------------------

    @transaction
    def add_upgrade(self, s: Session, /, details: Details = lambda _: {}, **values: Any) -> UpgradeRow:
        """Register an upgrade; UpgradeRunning while the gallery has one that has not ended."""
        try:
            row = _new_upgrade(s, values, details)
        except IntegrityError as exc:
            s.rollback()
            raise errors.UpgradeRunning(
                "Another upgrade of this gallery has not ended; see it with: rmvdb status, then cutover, cleanup or rollback"
            ) from exc
        s.add(PhaseRow(upgrade_id=row.id, at=_now(s), phase=row.phase, note="registered"))
        return row

    @transaction
    def supersede(
        self, s: Session, /, ended: int, details: Details = lambda _: {}, *, epoch: int, note: str, **values: Any
    ) -> UpgradeRow:
        """End one upgrade and register the one that takes its place, in one transaction; what it announced is taken back.

        WrongPhase where it has ended or is being cleaned up, or where another plan is in force than that of `epoch`: what was
        decided is out of date.
        """
        # Locked before anything is looked at: whoever conducts the upgrade that ends may be about to change the plan.
        gallery = s.scalars(_gallery_of(ended).with_for_update(key_share=True, of=GalleryRow)).one()
        before = s.get_one(UpgradeRow, ended, with_for_update=True)
        heir = and_(or_(UpgradeRow.undoes == ended, UpgradeRow.supersedes == ended), UpgradeRow.phase != Phase.ENDED)
        if there := s.scalar(select(UpgradeRow).where(heir, UpgradeRow.to_version == values["to_version"])):
            return there  # repeated, because the answer of the first try was lost
        _refuse_ended(s, ended)
        if before.phase == Phase.CLEANING_UP:
            raise errors.WrongPhase(f"Upgrade {ended} is {before.phase}; there is no way back from there")
        if gallery.epoch != epoch:
            raise errors.WrongPhase(f"Gallery {gallery.name!r} is served differently since; run the same command again")
        gallery.next_epoch, gallery.closing_until = None, None
        before.phase, before.ended_at = Phase.ENDED, _now(s)
        s.flush()  # one active upgrade per gallery: the old one ends first
        row = _new_upgrade(s, values, details)
        s.add(PhaseRow(upgrade_id=ended, at=_now(s), phase=Phase.ENDED, note=note))
        s.add(PhaseRow(upgrade_id=row.id, at=_now(s), phase=row.phase, note=f"takes the place of upgrade {ended}"))
        return row

    @transaction
    def active_upgrade(self, s: Session, /, gallery_id: int) -> UpgradeRow | None:
        """The upgrade of this gallery that has not ended."""
        return s.scalar(select(UpgradeRow).where(UpgradeRow.gallery_id == gallery_id, UpgradeRow.phase != Phase.ENDED))

    @transaction
    def upgrade(self, s: Session, /, upgrade_id: int) -> UpgradeRow:
        """One upgrade as it is now."""
        return s.get_one(UpgradeRow, upgrade_id)

    @transaction
    def upgrades(self, s: Session, /, gallery_id: int | None = None) -> Sequence[UpgradeRow]:
        """Upgrades, ended ones too, oldest first."""
        every = select(UpgradeRow).order_by(UpgradeRow.id)
        return s.scalars(every if gallery_id is None else every.where(UpgradeRow.gallery_id == gallery_id)).all()

    @transaction
    def set_upgrade(
        self, s: Session, /, upgrade_id: int, *, note: str = "", was: Phase | None = None, baton: int | None = None, **values: Any
    ) -> None:
        """Change attributes; a changed phase or a note goes into the history. WrongPhase for the phase of one that has ended.

        Nothing changes where `was` is given and the upgrade is in another phase: somebody else was faster. UpgradeRunning where
        another has taken the baton that is given.
        """
        row = s.get_one(UpgradeRow, upgrade_id, with_for_update=True)
        _refuse_overtaken(s, upgrade_id, baton)
        if was is not None and row.phase not in (was, Phase.ENDED):
            return
        changed = values.get("phase", row.phase) != row.phase
        if changed:
            _refuse_ended(s, upgrade_id)
        for name, value in values.items():
            setattr(row, name, value)
        if values.get("phase") == Phase.ENDED:
            row.ended_at = _now(s)
        if changed or note:
            s.add(PhaseRow(upgrade_id=upgrade_id, at=_now(s), phase=row.phase, note=note))

    @transaction
    def refuse_ended(self, s: Session, /, upgrade_id: int) -> None:
        """WrongPhase where the upgrade has ended: another has taken its place, or undone it."""
        _refuse_ended(s, upgrade_id)

    @transaction
    def begin_clean_up(self, s: Session, /, upgrade_id: int) -> None:
        """From here on there is no way back; WrongPhase where the upgrade is not cut over (any more)."""
        row = s.get_one(UpgradeRow, upgrade_id, with_for_update=True)
        _refuse_ended(s, upgrade_id)
        if row.phase not in (Phase.CUT_OVER, Phase.CLEANING_UP):
            raise errors.WrongPhase(f"The upgrade is {row.phase}; clean up comes after cut-over: rmvdb cutover")
        if row.phase == Phase.CUT_OVER:
            row.phase = Phase.CLEANING_UP
            s.add(PhaseRow(upgrade_id=upgrade_id, at=_now(s), phase=row.phase, note="no way back from here"))

    @transaction
    def abandon(self, s: Session, /, upgrade_id: int, *, note: str) -> bool:
        """End an upgrade that nothing is served by, and take back what it announced; False where it is served already.

        The one that it superseded goes on.
        """
        upgrade = s.get_one(UpgradeRow, upgrade_id)
        gallery = s.get_one(GalleryRow, upgrade.gallery_id, with_for_update=True)
        if upgrade.phase != Phase.PLANNED or upgrade.new_collection == _plan(s, gallery, gallery.epoch).legs[0].collection:
            return False
        gallery.next_epoch, gallery.closing_until = None, None
        _end(s, [upgrade_id], note=note, resume=upgrade.supersedes)
        return True

    @transaction
    def history(self, s: Session, /, upgrade_id: int) -> Sequence[PhaseRow]:
        """What happened to an upgrade, in order."""
        return s.scalars(select(PhaseRow).where(PhaseRow.upgrade_id == upgrade_id).order_by(PhaseRow.id)).all()

    @transaction
    def lead(self, s: Session, /, upgrade_id: int, worker: str, seconds: float) -> int | None:
        """Become the one process that makes batches and changes phases: the baton, a fencing token; None while another has it."""
        free = or_(UpgradeRow.conductor.is_(None), UpgradeRow.conductor == worker, UpgradeRow.conductor_until < clock())
        values = {"conductor": worker, "conductor_until": clock() + seconds, "baton": UpgradeRow.baton + 1}
        taken = update(UpgradeRow).where(UpgradeRow.id == upgrade_id, free).values(**values)
        return s.scalar(taken.returning(UpgradeRow.baton))

    @transaction
    def keep_leading(self, s: Session, /, upgrade_id: int, baton: int, seconds: float) -> bool:
        """Hold the baton for longer, with `seconds=0` hand it back; False where another has it by now."""
        row = s.get(UpgradeRow, upgrade_id, with_for_update=True)
        if row is None or row.baton != baton:
            return False
        row.conductor, row.conductor_until = (row.conductor, _now(s) + seconds) if seconds else (None, None)
        return True

    @transaction
    def refuse_overtaken(self, s: Session, /, upgrade_id: int, baton: int | None) -> None:
        """UpgradeRunning where another has taken the baton."""
        _refuse_overtaken(s, upgrade_id, baton)

    # --- batches and claims -------------------------------------------------------------------------------------------

    @transaction
    def add_batches(
        self,
        s: Session,
        /,
        upgrade_id: int,
        batches: Sequence[tuple[Sequence[Id], Mapping[str, Any] | None]],
        *,
        first: int,
        baton: int | None = None,
    ) -> None:
        """Append batches (ids, origin) to the work list, priorities counting from `first`; none is added twice.

        WrongPhase where the upgrade has ended, UpgradeRunning where another one has the baton by now: whoever makes its list
        does not know yet.
        """
        _refuse_ended(s, upgrade_id)
        _refuse_overtaken(s, upgrade_id, baton)
        for priority, (ids, origin) in enumerate(batches, start=first):
            there = select(BatchRow.id).where(BatchRow.upgrade_id == upgrade_id, BatchRow.priority == priority)
            if s.scalar(there) is None:
                s.add(_batch(upgrade_id, priority, ids, origin))

    @transaction
    def add_late(self, s: Session, /, upgrade_id: int, ids: Sequence[Id]) -> None:
        """Put records behind every batch, but for those that a batch holds which is not retired: in two batches at once, one
        would find them gone because of the other. WrongPhase where the upgrade has ended."""
        _refuse_ended(s, upgrade_id)
        s.execute(select(UpgradeRow.id).where(UpgradeRow.id == upgrade_id).with_for_update())
        held = _listed(s, upgrade_id)
        if late := [id for id in ids if id not in held]:
            s.add(_batch(upgrade_id, _last_priority(s, upgrade_id) + 1, late, None))

    @transaction
    def discard_list(self, s: Session, /, upgrade_id: int, *, baton: int | None = None) -> None:
        """Forget the batches nobody has begun, so that the list can be made again; UpgradeRunning as in `add_batches`."""
        _refuse_overtaken(s, upgrade_id, baton)
        s.execute(delete(BatchRow).where(BatchRow.upgrade_id == upgrade_id, BatchRow.state == BatchState.PENDING))

    @transaction
    def next_priority(self, s: Session, /, upgrade_id: int) -> int:
        """The first priority that is behind every batch."""
        return _last_priority(s, upgrade_id) + 1

    @transaction
    def listed_ids(self, s: Session, /, upgrade_id: int) -> set[Id]:
        """The ids of every batch that is not retired."""
        return _listed(s, upgrade_id)

    @transaction
    def claim(
        self, s: Session, /, upgrade_id: int, worker: str, *, lease: float, longest_call: float, grace: float, copy: bool
    ) -> BatchRow | None:
        """Take the first batch that has work: its grace is over, it was begun and left, or (`copy`) it is fresh; a pause lets no
        fresh one begin. None while an epoch changes."""
        # Locked first, so that no upgrade ends and no epoch changes between a look and the claim.
        gallery = s.scalars(_gallery_of(upgrade_id).with_for_update(read=True, of=GalleryRow)).one()
        upgrade = s.get_one(UpgradeRow, upgrade_id)
        if _closing(s, gallery) or upgrade.phase == Phase.ENDED:
            return None
        free = or_(BatchRow.lease_until.is_(None), BatchRow.lease_until + longest_call < clock())
        due = and_(BatchRow.state == BatchState.COPIED, BatchRow.copied_at + grace <= clock(), free)
        work = [due, and_(BatchRow.state.in_(BEGUN), free)]
        if copy and not upgrade.paused:
            work.append(BatchRow.state == BatchState.PENDING)
        chosen = (
            select(BatchRow)
            .where(BatchRow.upgrade_id == upgrade_id, or_(*work))
            .order_by(BatchRow.state != BatchState.REMOVING, BatchRow.state != BatchState.COPIED, BatchRow.priority)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        row = s.scalar(chosen)
        if row is not None:
            row.worker, row.token, row.lease_until = worker, row.token + 1, _now(s) + lease
            if row.state in (BatchState.PENDING, BatchState.WRITING):
                row.state = BatchState.CLAIMED
        return row

    @transaction
    def renew(self, s: Session, /, worker: str, upgrade_id: int | None, *, lease: float, note: str = "") -> set[int]:
        """A worker's heartbeat: it lives, and so do its claims, whose ids come back; one whose lease has run out stays lost.

        RegistryError where the upgrade is not known: a registry that was lost must let the claims of its workers run out.
        """
        if upgrade_id is not None and s.get(UpgradeRow, upgrade_id) is None:
            raise errors.RegistryError(f"The registry at {self.shown_url} has no upgrade {upgrade_id}; rmvdb registry rebuild")
        mine = update(BatchRow).where(BatchRow.worker == worker, BatchRow.lease_until > clock())
        held = set(s.scalars(mine.values(lease_until=clock() + lease).returning(BatchRow.id)))
        values = {"upgrade_id": upgrade_id, "note": note, "seen_at": clock()}
        if not s.execute(update(WorkerRow).where(WorkerRow.id == worker).values(**values)).rowcount:  # type: ignore[attr-defined]
            s.execute(insert(WorkerRow).values(id=worker, **values))
        return held

    @transaction
    def retire_worker(self, s: Session, /, worker: str) -> None:
        """A worker that ends leaves, and its claims with it."""
        _let_go(s, BatchRow.worker == worker)
        s.execute(delete(WorkerRow).where(WorkerRow.id == worker))

    @transaction
    def workers(self, s: Session, /, upgrade_id: int, *, within: float) -> Sequence[WorkerRow]:
        """The workers at this upgrade that gave a heartbeat within so many seconds."""
        return s.scalars(select(WorkerRow).where(WorkerRow.upgrade_id == upgrade_id, WorkerRow.seen_at > clock() - within)).all()

    @transaction
    def advance(self, s: Session, /, batch: BatchRow, state: BatchState, **values: Any) -> None:
        """Move a claimed batch on within its claim; LeaseLost when somebody else has it by now."""
        _move(s, batch, state, **values)

    @transaction
    def copied(self, s: Session, /, batch: BatchRow, *, again: Sequence[Id], aside: Mapping[Id, str]) -> None:
        """End the claim on a batch, which waits for its grace: `again` was left to a client, `aside` leaves it for quarantine."""
        left = [id for id in unpack_ids(batch.ids) if id not in aside]
        ended = {"copied_at": clock(), "lease_until": None, "worker": None}
        _move(s, batch, BatchState.COPIED, ids=pack_ids(left), count=len(left), again=pack_ids(again), **ended)
        _set_aside(s, batch.upgrade_id, aside)

    @transaction
    def hand_back(self, s: Session, /, batch: BatchRow) -> None:
        """Give up a claim; does nothing where somebody else has it by now."""
        _let_go(s, and_(BatchRow.id == batch.id, BatchRow.token == batch.token))

    @transaction
    def retire(self, s: Session, /, batch: BatchRow, *, moved: int, again: Sequence[Id]) -> None:
        """End a batch; the ids in `again` become a batch of their own at the same place in the order, begun already."""
        mine = and_(BatchRow.id == batch.id, BatchRow.token == batch.token)
        if s.scalar(select(BatchRow.state).where(mine)) == BatchState.RETIRED:
            return  # repeated, because the answer of the first try was lost
        _move(s, batch, BatchState.RETIRED, count=moved, lease_until=None, worker=None)
        if again:
            # Not a fresh one: what it holds is in the new collection, too, and not what it is in the old one.
            begun = {"state": BatchState.CLAIMED, "copied_at": batch.copied_at, "archive": batch.archive}
            s.add(_batch(batch.upgrade_id, batch.priority, again, batch.origin, **begun))

    @transaction
    def batches(
        self, s: Session, /, upgrade_id: int, *, after: int = 0, limit: int = 200, state: BatchState | None = None
    ) -> Sequence[BatchRow]:
        """Batches by row id, a page at a time."""
        page = select(BatchRow).where(BatchRow.upgrade_id == upgrade_id, BatchRow.id > after).order_by(BatchRow.id).limit(limit)
        return s.scalars(page if state is None else page.where(BatchRow.state == state)).all()

    @transaction
    def counts(self, s: Session, /, upgrade_id: int) -> dict[BatchState, tuple[int, int]]:
        """Batches and records by state."""
        grouped = (
            select(BatchRow.state, func.count(), func.sum(BatchRow.count))
            .where(BatchRow.upgrade_id == upgrade_id)
            .group_by(BatchRow.state)
        )
        return {BatchState(state): (batches, int(records)) for state, batches, records in s.execute(grouped)}

    @transaction
    def progress(self, s: Session, /, upgrade_id: int, *, window: float = 60.0) -> Progress:
        """How far the work list is, and how fast it went over the last `window` seconds."""
        mine = BatchRow.upgrade_id == upgrade_id
        total = s.scalar(select(func.sum(BatchRow.count)).where(mine)) or 0
        done = s.scalar(select(func.sum(BatchRow.count)).where(mine, BatchRow.state.in_(MOVED))) or 0
        begun = s.scalar(select(func.sum(BatchRow.count)).where(mine, BatchRow.state.in_(COPYING))) or 0
        stuck = s.scalar(select(func.count()).select_from(QuarantineRow).where(QuarantineRow.upgrade_id == upgrade_id)) or 0
        recent = and_(mine, BatchRow.copied_at > clock() - window)
        moved, since = s.execute(select(func.sum(BatchRow.count), clock() - func.min(BatchRow.copied_at)).where(recent)).one()
        rate = float(moved) / max(float(since), 1.0) if moved and since else None
        return Progress(done=int(done), total=int(total) + stuck, begun=int(begun), quarantined=stuck, rate=rate)

    # --- intents ------------------------------------------------------------------------------------------------------

    @transaction
    def open_intents(
        self, s: Session, /, gallery: str, kind: str, ids: Sequence[Id], *, client: str, lasting: float
    ) -> Opened | None:
        """Register a write of these records and read the plan it must follow in one transaction; None while an epoch changes,
        and until every live client serves by it: one that searches by the plan before would miss what is written.

        `client` names this one write of a client, so that the same call again takes the place of the first.
        """
        # Locked until the commit, so that of two writes of one record the one with the smaller id is also seen first.
        row = _named(s, GalleryRow, "gallery", gallery, lock=_FOR_CHANGE)
        if _closing(s, row) or s.scalar(_behind(s, row)):
            return None
        # Repeated because the first answer was lost, or an epoch was changing: this write must not wait for itself.
        mine = and_(IntentRow.record.in_([key(id) for id in ids]), IntentRow.client == client)
        s.execute(delete(IntentRow).where(IntentRow.gallery_id == row.id, or_(mine, _forgotten(row))))
        plan = _plan(s, row, row.epoch)
        upgrade = _writing_for(s, row, plan)
        now = _now(s)
        made = [
            IntentRow(
                gallery_id=row.id,
                upgrade_id=upgrade,
                record=key(id),
                kind=kind,
                epoch=row.epoch,
                client=client,
                opened_at=now,
                deadline=now + lasting,
            )
            for id in ids
        ]
        s.add_all(made)
        s.flush()
        return Opened(plan=plan, intents=tuple(each.id for each in made), upgrade=upgrade)

    @transaction
    def close_intents(self, s: Session, /, opened: Opened) -> bool:
        """Mark a write as done, unless it is past its deadline; outside an upgrade nobody asks for it again."""
        mine = IntentRow.id.in_(opened.intents)
        in_time = and_(mine, ~IntentRow.done, IntentRow.deadline > clock())
        if opened.upgrade is None:
            s.execute(delete(IntentRow).where(in_time))
        else:
            s.execute(update(IntentRow).where(in_time).values(done=True, done_at=clock()))
        return s.scalar(select(IntentRow.id).where(mine, ~IntentRow.done).limit(1)) is None

    @transaction
    def extend_intents(self, s: Session, /, opened: Opened, *, lasting: float) -> None:
        """Announce a write that still waits anew, before its deadline makes everybody believe that it was never made."""
        s.execute(update(IntentRow).where(IntentRow.id.in_(opened.intents)).values(deadline=clock() + lasting))

    @transaction
    def withdraw_intents(self, s: Session, /, opened: Opened) -> None:
        """Forget a write that never began."""
        s.execute(delete(IntentRow).where(IntentRow.id.in_(opened.intents)))

    @transaction
    def blocked(self, s: Session, /, opened: Opened, ids: Sequence[Id]) -> bool:
        """Whether a live claim that holds one of these ids is *writing*, or an earlier write of one of them is still open."""
        gallery_id = s.scalar(select(IntentRow.gallery_id).where(IntentRow.id == opened.intents[0]))
        keys = [key(id) for id in ids]
        earlier = and_(IntentRow.gallery_id == gallery_id, IntentRow.record.in_(keys), IntentRow.id < opened.intents[0])
        if s.scalar(select(IntentRow.id).where(earlier, ~IntentRow.done, IntentRow.deadline > clock()).limit(1)):
            return True
        live = and_(BatchRow.upgrade_id == opened.upgrade, BatchRow.lease_until > clock())
        writing = s.scalars(select(BatchRow.ids).where(live, BatchRow.state == BatchState.WRITING)).all()
        undoing = s.scalars(select(BatchRow.gone).where(live, BatchRow.state == BatchState.REMOVING)).all()
        wanted = set(ids)
        return any(wanted.intersection(unpack_ids(packed)) for packed in (*writing, *undoing))

    @transaction
    def intents(self, s: Session, /, upgrade_id: int, ids: Collection[Id]) -> dict[str, IntentRow]:
        """By key, the intent that decides for each of these records: one that is open within its deadline, else the last done."""
        valid = or_(IntentRow.done, IntentRow.deadline > clock())
        rows: dict[str, IntentRow] = {}
        for row in _intents_of(s, upgrade_id, ids, valid):
            if row.record not in rows or rows[row.record].done:
                rows[row.record] = row
        return rows

    @transaction
    def announced(self, s: Session, /, upgrade_id: int, ids: Collection[Id]) -> dict[str, IntentRow]:
        """By key, the last intent of each of these records, in whatever state: its writer may have been killed before or after
        the write reached the engine."""
        return {row.record: row for row in _intents_of(s, upgrade_id, ids, true())}

    @transaction
    def last_done(self, s: Session, /, upgrade_id: int, ids: Collection[Id]) -> dict[str, str]:
        """By key, `upsert` or `delete`: what the last write that was done of each of these records was."""
        return {row.record: row.kind for row in _intents_of(s, upgrade_id, ids, IntentRow.done.is_(True))}

    @transaction
    def written(self, s: Session, /, upgrade_id: int, *, after: int = 0, limit: int = 1000) -> Sequence[IntentRow]:
        """The intents of an upgrade, in whatever state, by row id, a page at a time."""
        rows = select(IntentRow).where(IntentRow.upgrade_id == upgrade_id, IntentRow.id > after)
        return s.scalars(rows.order_by(IntentRow.id).limit(limit)).all()

    @transaction
    def open_writes(self, s: Session, /, gallery_id: int) -> set[int]:
        """The intents of writes that are under way, one a record."""
        mine = and_(IntentRow.gallery_id == gallery_id, ~IntentRow.done, IntentRow.deadline > clock())
        return set(s.scalars(select(IntentRow.id).where(mine)))

    @transaction
    def cut_off(self, s: Session, /, gallery: str) -> list[Id]:
        """The records of writes that were begun outside an upgrade, or while one copied, and never ended: in part they may be
        made."""
        row = _named(s, GalleryRow, "gallery", gallery)
        never = and_(IntentRow.gallery_id == row.id, IntentRow.upgrade_id.is_(None), ~IntentRow.done)
        keys = s.scalars(select(IntentRow.record).where(never, IntentRow.deadline <= clock()).distinct())
        return [int(each) if row.id_type == IdType.INT64 else each for each in keys]

    # --- quarantine ---------------------------------------------------------------------------------------------------

    @transaction
    def quarantined(self, s: Session, /, upgrade_id: int) -> Sequence[QuarantineRow]:
        """The records set aside, oldest first."""
        return s.scalars(select(QuarantineRow).where(QuarantineRow.upgrade_id == upgrade_id).order_by(QuarantineRow.id)).all()

    @transaction
    def release(self, s: Session, /, upgrade_id: int, ids: Sequence[Id], *, again: bool) -> None:
        """Take records out of quarantine; with `again` those that were there become a batch each in the same transaction."""
        there: set[str] = set()
        for some in _chunks(list(ids), 500):
            mine = and_(QuarantineRow.upgrade_id == upgrade_id, QuarantineRow.record.in_([key(id) for id in some]))
            there.update(s.scalars(delete(QuarantineRow).where(mine).returning(QuarantineRow.record)))
        if again:
            first = _last_priority(s, upgrade_id) + 1
            # One batch each: a batch that fails as a whole stops the upgrade, and these may well fail again.
            released = [id for id in ids if key(id) in there]
            s.add_all([_batch(upgrade_id, first + at, [id], None) for at, id in enumerate(released)])

    @transaction
    def end(self, s: Session, /, upgrade_id: int, *others: int, note: str, resume: int | None = None) -> None:
        """End an upgrade for good. Its work list and intents go, and those of the `others` that ended before; histories stay.

        `resume`: the upgrade that goes on from where it was superseded; the writes announced since are its own from here on.
        """
        _end(s, (upgrade_id, *others), note=note, resume=resume)


# --- rows from values and back ----------------------------------------------------------------------------------------


def _contents(s: Session) -> Contents:
    return {table.__tablename__: [_to_json(row) for row in s.execute(_kept(table)).mappings()] for table in KEPT}


def _kept(table: type[Table]) -> Select[Any]:
    columns = [column for column in table.__table__.columns if column.name not in PASSING]
    return select(*columns).order_by(*table.__mapper__.primary_key)


def _to_json(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: base64.b64encode(value).decode() if isinstance(value, bytes) else value for name, value in row.items()}


def _insert(s: Session, table: type[Table], rows: Sequence[Mapping[str, Any]]) -> None:
    packed = {column.name for column in table.__table__.columns if isinstance(column.type, LargeBinary)}
    values = [{name: base64.b64decode(v) if v and name in packed else v for name, v in row.items()} for row in rows]
    if values:
        s.execute(insert(table), values)
    if s.get_bind().dialect.name == "postgresql" and "id" in table.__table__.columns:  # SQLite goes on from the last row
        sequence = func.pg_get_serial_sequence(table.__tablename__, "id")
        s.execute(select(func.setval(sequence, select(func.max(table.__table__.c.id)).scalar_subquery())))


def _end(s: Session, ended: Sequence[int], *, note: str, resume: int | None) -> None:
    """The first of these ends now, the others ended before it."""
    if resume is not None:
        s.execute(update(IntentRow).where(IntentRow.upgrade_id.in_(ended)).values(upgrade_id=resume))
    _forget_work(s, ended)
    row = s.get_one(UpgradeRow, ended[0])
    if row.phase == Phase.ENDED:
        return  # repeated, because the answer of the first try was lost
    row.phase, row.ended_at = Phase.ENDED, _now(s)
    s.add(PhaseRow(upgrade_id=row.id, at=_now(s), phase=Phase.ENDED, note=note))
    s.flush()  # one active upgrade per gallery: this one ends first
    if resume is not None:
        again = s.get_one(UpgradeRow, resume)
        again.phase, again.ended_at, again.paused = Phase.SERVING_BOTH, None, False
        s.add(PhaseRow(upgrade_id=resume, at=_now(s), phase=again.phase, note=f"goes on after upgrade {row.id}"))


def _forget_work(s: Session, upgrades: Sequence[int]) -> None:
    for table in (BatchRow, IntentRow, QuarantineRow):
        s.execute(delete(table).where(table.upgrade_id.in_(upgrades)))


def _forget_rarest(s: Session, gallery_id: int) -> None:
    mine = TrafficRow.gallery_id == gallery_id
    held = s.scalar(select(func.count()).select_from(TrafficRow).where(mine)) or 0
    if held > MOST_FOUND:  # somewhat more than must be, so that it is not done every time
        some = held - MOST_FOUND * 9 // 10
        rarest = select(TrafficRow.record).where(mine).order_by(TrafficRow.weight, TrafficRow.record).limit(some)
        s.execute(delete(TrafficRow).where(mine, TrafficRow.record.in_(rarest)).execution_options(synchronize_session=False))


def _new_upgrade(s: Session, values: Mapping[str, Any], details: Details) -> UpgradeRow:
    row = UpgradeRow(**{"old_collections": [], "new_collection": ""} | dict(values), created_at=_now(s))
    s.add(row)
    s.flush()
    for name, value in details(row.id).items():
        setattr(row, name, value)
    return row


def _batch(upgrade_id: int, priority: int, ids: Sequence[Id], origin: Mapping[str, Any] | None, **begun: Any) -> BatchRow:
    return BatchRow(
        upgrade_id=upgrade_id,
        priority=priority,
        ids=pack_ids(ids),
        count=len(ids),
        origin=dict(origin) if origin else None,
        **{"state": BatchState.PENDING} | begun,
    )


def _listed(s: Session, upgrade_id: int) -> set[Id]:
    rows = s.scalars(select(BatchRow.ids).where(BatchRow.upgrade_id == upgrade_id, BatchRow.state != BatchState.RETIRED))
    return {id for packed in rows for id in unpack_ids(packed)}


def _last_priority(s: Session, upgrade_id: int) -> int:
    return s.scalar(select(func.max(BatchRow.priority)).where(BatchRow.upgrade_id == upgrade_id)) or 0


def _collection(
    gallery: GalleryRow, model: str, schema: Schema, search: Mapping[str, Any], *, adopted: bool, at: float
) -> CollectionRow:
    return CollectionRow(
        gallery_id=gallery.id,
        name=schema.collection,
        model=model,
        schema=schema_to_json(schema),
        search=dict(search),
        adopted=adopted,
        created_at=at,
    )


def _plan_row(gallery: GalleryRow, epoch: int, legs: Sequence[Leg], times: Mapping[str, float], *, at: float) -> PlanRow:
    return PlanRow(gallery_id=gallery.id, epoch=epoch, legs=[leg_to_json(leg) for leg in legs], created_at=at, **times)


def _forgotten(gallery: GalleryRow) -> ColumnElement[bool]:
    """Intents past their deadline while there is no upgrade: one that comes begins with what they left. (`cut_off` is asked for
    those from while a copy was made.)"""
    on = select(UpgradeRow.id).where(UpgradeRow.gallery_id == gallery.id, UpgradeRow.phase != Phase.ENDED)
    return and_(IntentRow.upgrade_id.is_(None), ~IntentRow.done, IntentRow.deadline <= clock(), ~on.exists())


def _plan(s: Session, gallery: GalleryRow, epoch: int) -> ServingPlan:
    row = _row_of_plan(s, gallery, epoch)
    legs = [leg_from_json(leg) for leg in row.legs]
    return ServingPlan(
        gallery=gallery.name,
        epoch=row.epoch,
        legs=tuple(leg for leg in legs if leg.searched),
        mirrors=tuple(leg for leg in legs if not leg.searched),
        max_age=row.max_age,
        longest_search=row.longest_search,
        staleness=row.staleness,
    )


def _legs(s: Session, gallery: GalleryRow, epoch: int) -> list[Leg]:
    """Legs and mirrors, as they were announced."""
    return [leg_from_json(leg) for leg in _row_of_plan(s, gallery, epoch).legs]


def _row_of_plan(s: Session, gallery: GalleryRow, epoch: int) -> PlanRow:
    return s.scalars(select(PlanRow).where(PlanRow.gallery_id == gallery.id, PlanRow.epoch == epoch)).one()


def _writing_for(s: Session, gallery: GalleryRow, plan: ServingPlan) -> int | None:
    """The upgrade that must know of a write made under this plan: the one that fills the collection written to.

    Not simply the active one: while an upgrade is planned its writes still go to the old collection alone, or belong to the
    upgrade whose place it takes.
    """
    active = s.scalar(select(UpgradeRow).where(UpgradeRow.gallery_id == gallery.id, UpgradeRow.phase != Phase.ENDED))
    if active is None:
        return None
    before = (s.get(UpgradeRow, each) for each in (active.undoes, active.supersedes) if each is not None)
    filling = (each.id for each in (active, *before) if each is not None and each.new_collection == plan.legs[0].collection)
    return next(filling, None)


def _galleries_with(version: str) -> Select[str]:
    held = select(CollectionRow.gallery_id).where(CollectionRow.model == version)
    upgraded = select(UpgradeRow.gallery_id).where(or_(UpgradeRow.from_version == version, UpgradeRow.to_version == version))
    return select(GalleryRow.name).where(or_(GalleryRow.id.in_(held), GalleryRow.id.in_(upgraded))).limit(1)


def _refuse_used(s: Session, gallery: GalleryRow) -> None:
    on = and_(UpgradeRow.gallery_id == gallery.id, UpgradeRow.phase != Phase.ENDED)
    if upgrade := s.scalar(select(UpgradeRow).where(on)):
        raise errors.UpgradeRunning(
            f"Gallery {gallery.name!r} is in upgrade {upgrade.id} from {upgrade.from_version} to {upgrade.to_version} "
            f"({upgrade.phase}); end it first: rmvdb cleanup, or rmvdb rollback"
        )
    if client := s.scalar(_live_clients(s, gallery).limit(1)):
        raise errors.UsageError(f"Gallery {gallery.name!r} is served by client {client.id}; close it first, then try again")


def _refuse_ended(s: Session, upgrade_id: int | None) -> None:
    """Nobody goes on with an upgrade that somebody else has ended: WrongPhase."""
    if upgrade_id is not None and s.scalar(select(UpgradeRow.phase).where(UpgradeRow.id == upgrade_id)) == Phase.ENDED:
        raise errors.WrongPhase(f"Upgrade {upgrade_id} has ended; see what took its place: rmvdb history")


def _refuse_overtaken(s: Session, upgrade_id: int, baton: int | None) -> None:
    """Nobody goes on with a baton that another has taken: UpgradeRunning. Locked, so that none is taken before the commit."""
    row = s.get_one(UpgradeRow, upgrade_id, with_for_update=True)
    if baton not in (None, row.baton):
        raise errors.UpgradeRunning(
            f"{row.conductor or 'Another process'} took upgrade {upgrade_id} over while this one was suspended; "
            "watch it with rmvdb status --watch"
        )


def _move(s: Session, batch: BatchRow, state: BatchState, **values: Any) -> None:
    """Change a claimed batch under its fencing token."""
    mine = and_(BatchRow.id == batch.id, BatchRow.token == batch.token)
    if not s.execute(update(BatchRow).where(mine).values(state=state, **values)).rowcount:  # type: ignore[attr-defined]
        raise errors.LeaseLost(f"Batch {batch.id} was taken over by another worker; nothing of it was changed here since")


def _let_go(s: Session, mine: ColumnElement[bool]) -> None:
    """End claims: what nothing was written of is free at once, the rest when its lease has run out, for a call of it that failed
    may still arrive. No heartbeat keeps that lease."""
    s.execute(update(BatchRow).where(mine, _UNWRITTEN).values(state=BatchState.PENDING))
    unwritten = BatchRow.state.in_((BatchState.PENDING, BatchState.CLAIMED, BatchState.COPIED))
    s.execute(update(BatchRow).where(mine).values(worker=None, lease_until=case((unwritten, None), else_=BatchRow.lease_until)))


def _set_aside(s: Session, upgrade_id: int, reasons: Mapping[Id, str]) -> None:
    for id, reason in reasons.items():
        mine = and_(QuarantineRow.upgrade_id == upgrade_id, QuarantineRow.record == key(id))
        s.execute(delete(QuarantineRow).where(mine))
        s.add(QuarantineRow(upgrade_id=upgrade_id, record=key(id), reason=reason[:2000], at=_now(s)))


def _intents_of(s: Session, upgrade_id: int, ids: Collection[Id], which: ColumnElement[bool]) -> Iterable[IntentRow]:
    for some in _chunks([key(id) for id in ids], 500):
        found = select(IntentRow).where(IntentRow.upgrade_id == upgrade_id, IntentRow.record.in_(some), which)
        yield from s.scalars(found.order_by(IntentRow.id))


# --- who is in the way of the next epoch ------------------------------------------------------------------------------


def _live_clients(s: Session, gallery: GalleryRow) -> Select[ClientRow]:
    # A client seen longer ago than its plan's maximum age asks again before it searches, so nobody needs to wait for it.
    max_age = _plan(s, gallery, gallery.epoch).max_age
    return select(ClientRow).where(ClientRow.gallery_id == gallery.id, ClientRow.seen_at > clock() - max_age)


def _behind(s: Session, gallery: GalleryRow) -> Any:
    return _live_clients(s, gallery).where(ClientRow.epoch < gallery.epoch).limit(1)


def _unready(s: Session, gallery: GalleryRow, epoch: int) -> list[str]:
    return [
        f"client {row.id} cannot serve epoch {epoch} yet{': ' + row.trouble if row.trouble else ''}"
        for row in s.scalars(_live_clients(s, gallery))
        if row.ready < epoch
    ]


def _gallery_of(upgrade_id: int) -> Select[GalleryRow]:
    return select(GalleryRow).join(UpgradeRow, UpgradeRow.gallery_id == GalleryRow.id).where(UpgradeRow.id == upgrade_id)


def _closing(s: Session, gallery: GalleryRow) -> bool:
    return gallery.rebuilding or (gallery.closing_until is not None and gallery.closing_until > _now(s))


def _claimed(s: Session, gallery: GalleryRow) -> list[str]:
    upgrades = select(UpgradeRow.id).where(UpgradeRow.gallery_id == gallery.id)
    claims = and_(BatchRow.upgrade_id.in_(upgrades), BatchRow.lease_until > clock())
    return [
        f"worker {row.worker} is at batch {row.id}" if row.worker else f"a call that failed may still arrive for batch {row.id}"
        for row in s.scalars(select(BatchRow).where(claims).limit(5))
    ]


def _writing(s: Session, gallery: GalleryRow, *, before: float | None = None) -> list[str]:
    open_writes = and_(IntentRow.gallery_id == gallery.id, ~IntentRow.done, IntentRow.deadline > clock())
    if before is not None:
        open_writes = and_(open_writes, IntentRow.opened_at < before)
    return [f"{row.client} is writing record {row.record}" for row in s.scalars(select(IntentRow).where(open_writes).limit(5))]


def _lingering(s: Session, gallery: GalleryRow, epoch: int) -> list[str]:
    """Writes that take long, as those of a killed client do until their deadline: nobody else's write waits for them.

    But not for ever: where every write takes long, an epoch would never change.
    """
    announced = s.scalar(select(PlanRow.created_at).where(PlanRow.gallery_id == gallery.id, PlanRow.epoch == epoch)) or 0.0
    now = _now(s)
    return _writing(s, gallery, before=now - LONG) if now < announced + LINGER else []


# --- statements -------------------------------------------------------------------------------------------------------


def _now(s: Session) -> float:
    return s.scalar(select(clock())) or 0.0


#: Of a gallery's row, by whoever changes its epoch or begins a write; in the way of another one and of `{"read": True}`.
_FOR_CHANGE = {"key_share": True}


def _named(
    s: Session, table: type[Named], kind: str, name: str, *, hint: str = "", lock: Mapping[str, Any] | None = None
) -> Named:
    found = select(table).where(table.name == name)
    if lock:
        found = found.with_for_update(**lock)
    row = s.scalar(found)
    if row is None:
        raise errors.UnknownName(kind, name, s.scalars(select(table.name)), hint=hint)
    return row


def _chunks(values: Sequence[R], size: int) -> Iterable[Sequence[R]]:
    return (values[start : start + size] for start in range(0, len(values), size))


# --- the engine -------------------------------------------------------------------------------------------------------


#: A server that vanished without a word is noticed within seconds.
_POSTGRES = {
    "connect_timeout": 5,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
#: What SQLite calls a file that is busy, locked, unreadable or not to be opened just now.
_SQLITE_AWAY = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
)
#: What PostgreSQL says when another try cannot help.
_REFUSALS = ("authentication failed", "does not exist", "no pg_hba.conf entry")


def parsed_url(url: str) -> URL:
    """The database's URL in its parts; ConfigError, without its password, for one that has none."""
    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        raise errors.ConfigError(
            f"registry.url = {without_password(url)!r} cannot be read; write postgresql://user:password@host:5432/database, with "
            "%40, %3A and %2F for @, : and / in the password"
        ) from None  # its text may have a part of the password


def _engine(url: str) -> Engine:
    if make_url(url).get_backend_name() != "sqlite":
        try:
            engine = create_engine(url, pool_pre_ping=True, connect_args=_POSTGRES)
        except ModuleNotFoundError as exc:
            raise errors.RegistryError(f"PostgreSQL needs {exc.name}; install it: pip install 'rmvdb[postgres]'") from exc
    else:
        engine = create_engine(url, connect_args={"timeout": 5})
        if (database := make_url(url).database) and database != ":memory:":
            files.make_folder(Path(database).parent, "home, or registry.url,")
            event.listen(engine, "connect", lambda _, record: record.info.update(file=_file_at(database)))
            event.listen(engine, "checkout", functools.partial(_leave_removed_file, database))
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_immediate)
    event.listen(engine, "handle_error", _translate, retval=True)
    return engine


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # SQLAlchemy says BEGIN itself, below
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000"):
        connection.execute(f"PRAGMA {pragma}")


def _leave_removed_file(database: str, _: Any, record: Any, __: Any) -> None:
    # SQLite would go on reading and writing a file that has no name any more, while others have made a new one.
    if record.info["file"] != _file_at(database):
        raise DisconnectionError(f"{database} is not the file that was opened")  # the pool opens it again


def _file_at(database: str) -> tuple[int, int] | None:
    try:
        found = Path(database).stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _begin_immediate(connection: Connection) -> None:
    # SQLite's stand-in for row locks: whoever begins holds the database, so a read and the write that follows see one state.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _translate(context: Any) -> Exception | None:
    failure = context.original_exception
    words = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
    if (
        "no such table" in words
        or "no such column" in words
        or "UndefinedTable" in type(failure).__name__
        or "UndefinedColumn" in type(failure).__name__
    ):
        return errors.SchemaOutdated(
            "The registry's tables are missing or old; run: rmvdb db upgrade, or rmvdb registry rebuild if it was lost"
        )
    if "disk is full" in words or "No space left" in words:
        return errors.DiskFull("The disk that holds the registry is full; free some space, then run the same command again")
    if _is_away(context, words):
        away = _Away(words)
        away.__cause__ = failure
        return away
    if type(failure) is sqlite3.DatabaseError or isinstance(context.sqlalchemy_exception, OperationalError):
        return errors.RegistryError(f"The registry refused: {words}; mend registry.url or the database it names")
    return None


def _is_away(context: Any, words: str) -> bool:
    failure = context.original_exception
    if isinstance(failure, sqlite3.Error):
        return getattr(failure, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF in _SQLITE_AWAY
    known = context.is_disconnect or isinstance(context.sqlalchemy_exception, OperationalError | InterfaceError)
    return known and not any(refusal in words for refusal in _REFUSALS)
