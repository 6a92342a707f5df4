"""The registry's tables; ids of records are packed, one batch a row.

Times that something waits for are the registry's (`registry.clock`), others are seconds since 1970 by the database's clock.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from rmvdb.registry.upgrade_plan import EpochName, UpgradePlan
from rmvdb.text import storable

#: The revision of these tables: every call compares it with the database's.
REVISION = "0002"
#: Where the database's is: a name of our own, since it may be shared with an application that uses Alembic too.
REVISION_TABLE = "rmvdb_revision"

#: SQLite numbers a row by itself only where the key is a plain INTEGER.
Serial = BigInteger().with_variant(Integer(), "sqlite")


class Words(TypeDecorator[str]):
    """What user code, an engine or a command said: what no database keeps in it (NUL, half a surrogate pair) is replaced."""

    impl, cache_ok = Text, True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """As it is stored, 2,000 characters at most."""
        return value and storable(value[:2000])


class PlanJson(TypeDecorator[UpgradePlan]):
    """An upgrade's plan, stored as JSON."""

    impl, cache_ok = JSON, True

    def process_bind_param(self, value: UpgradePlan | None, dialect: Dialect) -> dict[str, Any] | None:
        """Return the stored form."""
        return None if value is None else value.to_json()

    def process_result_value(self, value: dict[str, Any] | None, dialect: Dialect) -> UpgradePlan | None:
        """Parse the stored form."""
        return None if value is None else UpgradePlan.from_json(value)


class Table(DeclarativeBase):
    """Base of all tables; names of constraints are fixed so that every migration can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JSON,
        list[Any]: JSON,
        bytes: LargeBinary,
        str: String(255),
        int: Integer,
        float: Float(53),
        bool: Boolean,
    }


class ArtifactRow(Table):
    """A file that rmvdb made and reads back: a transform, a calibration."""

    __tablename__ = "artifacts"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    suffix: Mapped[str] = mapped_column(String(32))
    size: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]


class VersionRow(Table):
    """A model version: immutable once registered."""

    __tablename__ = "model_versions"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    #: package.module:object, and the keyword arguments that it is called with.
    embedder: Mapped[str] = mapped_column(Text)
    options: Mapped[dict[str, Any]] = mapped_column(default=dict)
    classifier: Mapped[str | None] = mapped_column(Text)
    dim: Mapped[int]
    metric: Mapped[str] = mapped_column(String(16))
    #: SHA-256 over the weights, where the embedder has any.
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    #: float32 embeddings of the fixed probe items, shape (probes, dim), and the kind of the items.
    probes: Mapped[bytes | None]
    probe_kind: Mapped[str | None] = mapped_column(String(16))
    #: The version that this one adds a head (ρ) to, and the head.
    base: Mapped[str | None] = mapped_column(ForeignKey("model_versions.name"))
    head: Mapped[str | None] = mapped_column(ForeignKey("artifacts.sha256"))
    #: The version whose vectors its own were trained to be comparable with, as whoever registered it said.
    compatible_with: Mapped[str | None] = mapped_column(ForeignKey("model_versions.name"))
    created_at: Mapped[float]

    @property
    def digest(self) -> str:
        """SHA-256 over what was registered: forgotten and registered anew, a version of the same name may be another one."""
        names = [column.name for column in self.__table__.columns if column.name not in ("id", "created_at")]
        told = json.dumps({name: getattr(self, name) for name in names}, sort_keys=True, default=bytes.hex)
        return hashlib.sha256(told.encode()).hexdigest()


class ClockRow(Table):
    """The registry's time, in one row; see `registry.clock`."""

    __tablename__ = "clock"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    #: What it was when the database's clock showed `shown`.
    time: Mapped[float]
    shown: Mapped[float]
    #: What the database's clock was set back by in all, and how many processes have begun to look at it: who compared it with
    #: its own before that can't tell what passed since.
    back: Mapped[float] = mapped_column(default=0.0)
    starts: Mapped[int] = mapped_column(BigInteger, default=0)
    #: By how many seconds the database's clock was set last, and what it showed then.
    jump: Mapped[float] = mapped_column(default=0.0)
    jumped_at: Mapped[float] = mapped_column(default=0.0)


class IdentityRow(Table):
    """Which registry this is, in one row: the collections that it owns are marked by this name."""

    __tablename__ = "identity"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    name: Mapped[str] = mapped_column(String(32))


class ChangesRow(Table):
    """How often what the manifest holds was changed, in one row: of two copies of a registry it tells the newer one."""

    __tablename__ = "changes"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger)


class GalleryRow(Table):
    """All records that can be found together."""

    __tablename__ = "galleries"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    id_type: Mapped[str] = mapped_column(String(16))
    source: Mapped[str | None] = mapped_column(Text)
    #: The serving plan in force, and the one announced to the clients.
    epoch: Mapped[int]
    next_epoch: Mapped[int | None]
    #: Until then new writes wait, so that those begun under the old plan can end.
    closing_until: Mapped[float | None]
    #: Since when the plan in force is.
    served_since: Mapped[float | None]
    #: The registry was lost and the work is being made again: writes, claims and conductors wait.
    rebuilding: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[float]


class CollectionRow(Table):
    """A collection of a gallery, as it looked when it was registered."""

    __tablename__ = "collections"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"), index=True)
    name: Mapped[str] = mapped_column(unique=True)
    model: Mapped[str] = mapped_column(ForeignKey("model_versions.name"))
    schema: Mapped[dict[str, Any]]
    search: Mapped[dict[str, Any]] = mapped_column(default=dict)
    #: Made by somebody else: the first removal needs consent.
    adopted: Mapped[bool]
    removal_allowed: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[float]
    dropped_at: Mapped[float | None]


class PlanRow(Table):
    """A serving plan; never changed after it was written."""

    __tablename__ = "serving_plans"
    __table_args__ = (UniqueConstraint("gallery_id", "epoch"),)

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"))
    epoch: Mapped[int]
    legs: Mapped[list[Any]]
    max_age: Mapped[float]
    longest_search: Mapped[float]
    staleness: Mapped[float]
    #: The grace of the plan that it takes the place of, by which clients go on for as long.
    grace_before: Mapped[float]
    created_at: Mapped[float]


class UpgradeRow(Table):
    """One change of model of one gallery. At most one per gallery has not ended: a unique partial index, not an `if`."""

    __tablename__ = "upgrades"
    __table_args__ = (
        Index(
            "uq_upgrades_active",
            "gallery_id",
            unique=True,
            sqlite_where=text("phase <> 'ended'"),
            postgresql_where=text("phase <> 'ended'"),
        ),
        # No number is given twice, though a gallery was removed: collections are named after it.
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"), index=True)
    #: The version in the newest old collection, and the one in the new (ρ included).
    from_version: Mapped[str] = mapped_column(ForeignKey("model_versions.name"))
    to_version: Mapped[str] = mapped_column(ForeignKey("model_versions.name"))
    #: Those that are emptied, newest first: more than one where it began while another upgrade was on. A lifted copy is no other
    #: than the new one: its vectors are replaced.
    old_collections: Mapped[list[Any]]
    new_collection: Mapped[str]
    #: For a roll back: the upgrade whose archive gives the vectors.
    undoes: Mapped[int | None] = mapped_column(ForeignKey("upgrades.id"))
    #: The unfinished upgrade whose place it took; a roll back lets that one go on.
    supersedes: Mapped[int | None] = mapped_column(ForeignKey("upgrades.id"))
    phase: Mapped[str] = mapped_column(String(16))
    method: Mapped[str] = mapped_column(String(16))
    order: Mapped[str] = mapped_column(String(32))
    #: Everything else that was asked for and found: question, prediction, legs of each epoch …
    plan: Mapped[UpgradePlan] = mapped_column(PlanJson, default=UpgradePlan)
    #: Nothing of it goes on but what is in hand.
    paused: Mapped[bool] = mapped_column(default=False)
    #: Since when that is so by command; none where it only makes way for another upgrade.
    paused_at: Mapped[float | None]
    #: The limits of `throttle.Limits` that were asked for: none where each worker's own settings count, 0 where one was lifted.
    rate: Mapped[float | None]
    nice: Mapped[float | None]
    p99_ms: Mapped[float | None]
    #: Why work on it stands still, in words; empty while it goes on.
    reason: Mapped[str] = mapped_column(Words, default="")
    #: How far the copy of the original is, a `copy_collection.CopyPosition`, and the epoch in which that counts: what is
    #: written in another one does not reach the copy.
    copying: Mapped[dict[str, Any] | None]
    #: How far the comparison before cut-over is, a `compare.VerifyPosition`.
    verifying: Mapped[dict[str, Any] | None]
    #: How far the making of the work list is: the collection that is read, and how many of its records were.
    listing: Mapped[dict[str, Any] | None]
    #: The work list is complete.
    listed: Mapped[bool] = mapped_column(default=False)
    #: The process that makes batches and changes phases, and how long it may.
    conductor: Mapped[str | None]
    conductor_until: Mapped[float | None]
    #: Grows with every conductor: one that was overtaken fails on it.
    baton: Mapped[int] = mapped_column(BigInteger, default=0)
    created_at: Mapped[float]
    ended_at: Mapped[float | None]

    @property
    def makes_way(self) -> bool:
        """Whether it is paused by the command that puts another upgrade in its place, not by `rmvdb pause`."""
        return self.paused and self.paused_at is None

    @property
    def original(self) -> str | None:
        """The collection that is kept whole for an instant roll back; a copy of it is emptied."""
        legs = self.plan.epochs.get(EpochName.ORIGINAL)
        return legs[0].collection if legs else None

    @property
    def lift(self) -> str | None:
        """SHA-256 of h, where the copy holds the original's vectors lifted into the new space, and is re-embedded in place."""
        return self.plan.lift

    @property
    def in_place(self) -> bool:
        """Whether what is filled is what its records lie in already."""
        return self.new_collection in self.old_collections

    @property
    def made(self) -> list[str]:
        """The collections that are made for it: the copy of an original that is kept, too; none for a roll back."""
        if self.undoes is not None:
            return []
        return list(dict.fromkeys([self.new_collection, *(self.old_collections if self.original else [])]))

    @property
    def leaving(self) -> list[str]:
        """The collections that clean-up drops."""
        kept = [self.original] if self.original and self.undoes is None else []
        return [*(each for each in self.old_collections if each != self.new_collection), *kept]


class PhaseRow(Table):
    """What happened to an upgrade, and when."""

    __tablename__ = "phase_history"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    upgrade_id: Mapped[int] = mapped_column(ForeignKey("upgrades.id"), index=True)
    at: Mapped[float]
    phase: Mapped[str] = mapped_column(String(16))
    note: Mapped[str] = mapped_column(Words)


class BatchRow(Table):
    """One unit of backfill, and the claim on it."""

    __tablename__ = "batches"
    __table_args__ = (Index("ix_batches_work", "upgrade_id", "state", "priority"),)

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    upgrade_id: Mapped[int] = mapped_column(ForeignKey("upgrades.id"))
    #: The lowest goes first.
    priority: Mapped[int] = mapped_column(BigInteger)
    #: Packed by `registry.pack_ids`.
    ids: Mapped[bytes]
    count: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    worker: Mapped[str | None]
    #: Grows with every claim: a worker that lost its lease fails on it.
    token: Mapped[int] = mapped_column(BigInteger, default=0)
    lease_until: Mapped[float | None]
    copied_at: Mapped[float | None]
    #: The batch from which it came again, by however many others; none for one that was listed.
    root: Mapped[int | None] = mapped_column(BigInteger)
    #: Its records were moved and are lost since: what is in no old collection is put back from the archive.
    restore: Mapped[bool] = mapped_column(default=False, server_default=false())
    #: What was read, by old collection: path, SHA-256 and count of a Parquet file.
    archive: Mapped[dict[str, Any] | None]
    #: For a roll back: the files that hold the vectors to write, by the collection that they go back to; none where nobody had
    #: decided that the records leave it.
    origin: Mapped[dict[str, Any] | None]
    #: For a roll back: ids that are left as they are where they go back to; decided before anything is written.
    left: Mapped[bytes | None]
    #: Decided before anything is removed, so that a rerun does the same: ids to take out of every old collection, out of the new
    #: one (gone from old behind our back), and to move again (changed or being written).
    remove: Mapped[bytes | None]
    gone: Mapped[bytes | None]
    again: Mapped[bytes | None]


class IntentRow(Table):
    """A client's registered write of one record."""

    __tablename__ = "intents"
    # No id is given twice: a write that is marked done late must not mark another one.
    __table_args__ = (Index("ix_intents_record", "gallery_id", "record"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"))
    #: The upgrade that it must outlive; none outside one.
    upgrade_id: Mapped[int | None] = mapped_column(ForeignKey("upgrades.id"), index=True)
    #: `registry.key(id)`.
    record: Mapped[str] = mapped_column(Text)
    kind: Mapped[str] = mapped_column(String(8))
    done: Mapped[bool] = mapped_column(default=False)
    epoch: Mapped[int]
    client: Mapped[str]
    opened_at: Mapped[float]
    deadline: Mapped[float]
    done_at: Mapped[float | None]
    #: `sketch.of` the vector that a done upsert wrote into the collection that the upgrade fills.
    sketch: Mapped[bytes | None]


class QuarantineRow(Table):
    """A record that could not be re-embedded; it stays findable in the old collection."""

    __tablename__ = "quarantined"
    __table_args__ = (UniqueConstraint("upgrade_id", "record"),)

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    upgrade_id: Mapped[int] = mapped_column(ForeignKey("upgrades.id"))
    record: Mapped[str] = mapped_column(Text)
    reason: Mapped[str] = mapped_column(Words)
    at: Mapped[float]


class ClientRow(Table):
    """A process that searches: alive while seen within its plan's maximum age."""

    __tablename__ = "clients"

    id: Mapped[str] = mapped_column(primary_key=True)
    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"), index=True)
    epoch: Mapped[int]
    #: The newest epoch that it can serve, and why it can't serve the next one.
    ready: Mapped[int]
    trouble: Mapped[str] = mapped_column(Words, default="")
    #: How many of its latest searches count, and the milliseconds within which 99 % of them ended.
    searches: Mapped[int]
    p99_ms: Mapped[float]
    seen_at: Mapped[float]


class TraceRow(Table):
    """A number of a gallery that only rises. It is written beside the data, too: a registry behind that has gone back."""

    __tablename__ = "traces"

    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"), primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(BigInteger, default=0)
    #: The largest epoch that a client served by and this registry did not know.
    reported: Mapped[int] = mapped_column(default=0)
    #: How it was found that this registry has gone back; empty while it has not.
    trouble: Mapped[str] = mapped_column(Words, default="")


class TrafficRow(Table):
    """How often a record was found by searches."""

    __tablename__ = "traffic"

    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"), primary_key=True)
    #: `registry.key(id)`.
    record: Mapped[str] = mapped_column(Text, primary_key=True)
    #: The sum over its finds of 2^(time / half-life): the newer ones weigh more, and no older one has to be made less.
    weight: Mapped[float]


class WorkerRow(Table):
    """A process that backfills."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(primary_key=True)
    upgrade_id: Mapped[int | None]
    #: What holds it back, in words; empty where nothing does.
    note: Mapped[str] = mapped_column(Words, default="")
    seen_at: Mapped[float]
    #: The same by the database's clock, for people: the registry's time stands still while no process is at work.
    heard_at: Mapped[float]


#: What the manifest holds, each table after those that it refers to. The work (batches, intents, quarantine) is made again from
#: the collections and the archive, clients and workers tell of themselves, and what is found is counted anew.
MANIFEST_TABLES: tuple[type[Table], ...] = (
    IdentityRow,
    ChangesRow,
    ArtifactRow,
    VersionRow,
    GalleryRow,
    CollectionRow,
    PlanRow,
    UpgradeRow,
    PhaseRow,
)
#: Columns of these tables that hold for seconds only, or without which a step begins anew.
TRANSIENT_COLUMNS = frozenset(
    {"closing_until", "served_since", "rebuilding", "conductor", "conductor_until", "copying", "listing", "verifying"}
)
