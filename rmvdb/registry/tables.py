"""The registry's tables. Ids of records are packed, one batch in each row.

Times that a process waits for are the registry's (`registry.clock`). Other times are seconds since 1970 by the database's clock.
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
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from rmvdb.registry.columns import PlanJson, Serial, Words
from rmvdb.registry.upgrade_plan import EpochName, UpgradePlan

#: The revision of these tables: every call compares it with the database's.
REVISION = "0008"
#: Where the database's is: a name of our own, since it may be shared with an application that uses Alembic too.
REVISION_TABLE = "rmvdb_revision"

#: How the `id` of a command that takes an upgrade's place begins. A worker's begins with its host.
TAKES_ITS_PLACE = "takes its place: "


class Table(DeclarativeBase):
    """Base of all tables. The names of constraints are fixed, so that every migration can name them."""

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
    """A file that rmvdb made and reads again: a transform or a calibration."""

    __tablename__ = "artifacts"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    suffix: Mapped[str] = mapped_column(String(32))
    size: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]


class ArtifactPartRow(Table):
    """A part of an artifact's contents, for machines that do not share a home."""

    __tablename__ = "artifact_parts"

    sha256: Mapped[str] = mapped_column(ForeignKey("artifacts.sha256"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    data: Mapped[bytes]


class VersionRow(Table):
    """A model version. It never changes after it is registered."""

    __tablename__ = "model_versions"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    #: package.module:object, and the keyword arguments for it.
    embedder: Mapped[str] = mapped_column(Text)
    options: Mapped[dict[str, Any]] = mapped_column(default=dict)
    classifier: Mapped[str | None] = mapped_column(Text)
    dim: Mapped[int]
    metric: Mapped[str] = mapped_column(String(16))
    #: SHA-256 over the weights, if the embedder has any.
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    #: float32 embeddings of the fixed probe items, shape (probes, dim), and the items' kind.
    probes: Mapped[bytes | None]
    probe_kind: Mapped[str | None] = mapped_column(String(16))
    #: The same by `embed_queries`, empty if it takes no probe. None: the embedder had no `embed_queries` when it was registered,
    #: or an rmvdb registered it that did not know of any. Its queries are embedded as its records are.
    query_probes: Mapped[bytes | None]
    #: The version that this one adds a head (ρ) to, and the head.
    base: Mapped[str | None] = mapped_column(ForeignKey("model_versions.name"))
    head: Mapped[str | None] = mapped_column(ForeignKey("artifacts.sha256"))
    #: The version with which its vectors were trained to be comparable, as the user said at registration.
    compatible_with: Mapped[str | None] = mapped_column(ForeignKey("model_versions.name"))
    created_at: Mapped[float]

    @property
    def has_own_queries(self) -> bool:
        """Whether queries are embedded by `embed_queries`."""
        return self.query_probes is not None

    @property
    def digest(self) -> str:
        """SHA-256 over the registered values. A version that is removed and registered again may differ under the same name."""
        names = [column.name for column in self.__table__.columns if column.name not in ("id", "created_at")]
        if not self.has_own_queries:
            names.remove("query_probes")  # plans and embeddings are kept by the digest that an earlier rmvdb gave
        values = json.dumps({name: getattr(self, name) for name in names}, sort_keys=True, default=bytes.hex)
        return hashlib.sha256(values.encode()).hexdigest()


class ClockRow(Table):
    """The anchor of the registry's time, in one row; see `registry.clock`."""

    __tablename__ = "clock"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    #: The registry's time when the database's clock showed `shown`.
    time: Mapped[float]
    shown: Mapped[float]
    #: The seconds by which the database's clock was set back in all, and how many processes have started: a process that compared
    #: the clocks before another started cannot tell what passed since.
    back: Mapped[float] = mapped_column(default=0.0)
    starts: Mapped[int] = mapped_column(BigInteger, default=0)
    #: The last jump of the database's clock in seconds, and what it showed then.
    jump: Mapped[float] = mapped_column(default=0.0)
    jumped_at: Mapped[float] = mapped_column(default=0.0)


class IdentityRow(Table):
    """The registry's identity, in one row. The marks of its collections carry this name."""

    __tablename__ = "identity"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    name: Mapped[str] = mapped_column(String(32))


class ChangesRow(Table):
    """How often the manifest's rows were changed, in one row. It shows the newer of two copies of a registry."""

    __tablename__ = "changes"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger)


class GalleryRow(Table):
    """All records that can be found together, in however many collections."""

    __tablename__ = "galleries"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    id_type: Mapped[str] = mapped_column(String(16))
    source: Mapped[str | None] = mapped_column(Text)
    #: The serving plan in force, and the one announced to the clients.
    epoch: Mapped[int]
    next_epoch: Mapped[int | None]
    #: Until then new writes wait, so that writes under the old plan can end.
    closing_until: Mapped[float | None]
    #: When the plan in force began.
    served_since: Mapped[float | None]
    #: Whether the registry was lost and its work is being made again: writes, claims and conductors wait.
    rebuilding: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[float]


class CollectionRow(Table):
    """A collection of a gallery, as it was at registration."""

    __tablename__ = "collections"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"), index=True)
    name: Mapped[str] = mapped_column(unique=True)
    model: Mapped[str] = mapped_column(ForeignKey("model_versions.name"))
    schema: Mapped[dict[str, Any]]
    search: Mapped[dict[str, Any]] = mapped_column(default=dict)
    #: Whether another program made it. Then the first removal needs your consent.
    adopted: Mapped[bool]
    removal_allowed: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[float]
    dropped_at: Mapped[float | None]


class PlanRow(Table):
    """A serving plan. It never changes."""

    __tablename__ = "serving_plans"
    __table_args__ = (UniqueConstraint("gallery_id", "epoch"),)

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"))
    epoch: Mapped[int]
    legs: Mapped[list[Any]]
    max_age: Mapped[float]
    longest_search: Mapped[float]
    staleness: Mapped[float]
    #: The grace of the plan before it, which clients may still use for so long.
    grace_before: Mapped[float]
    created_at: Mapped[float]


class UpgradeRow(Table):
    """One change of model of one gallery. At most one per gallery has not ended: a unique partial index ensures it."""

    __tablename__ = "upgrades"
    __table_args__ = (
        Index(
            "uq_upgrades_active",
            "gallery_id",
            unique=True,
            sqlite_where=text("phase <> 'ended'"),
            postgresql_where=text("phase <> 'ended'"),
        ),
        # A number is never reused, even if a gallery was removed: collections are named after it.
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"), index=True)
    #: The version in the newest old collection, and the one in the new (ρ included).
    from_version: Mapped[str] = mapped_column(ForeignKey("model_versions.name"))
    to_version: Mapped[str] = mapped_column(ForeignKey("model_versions.name"))
    #: The collections to empty, newest first: more than one if it began during another upgrade. A lifted copy is the new
    #: collection itself, whose vectors are replaced.
    old_collections: Mapped[list[Any]]
    new_collection: Mapped[str]
    #: For a roll back: the upgrade whose archive gives the vectors.
    undoes: Mapped[int | None] = mapped_column(ForeignKey("upgrades.id"))
    #: The unfinished upgrade that it superseded. A roll back lets that one continue.
    supersedes: Mapped[int | None] = mapped_column(ForeignKey("upgrades.id"))
    phase: Mapped[str] = mapped_column(String(16))
    method: Mapped[str] = mapped_column(String(16))
    order: Mapped[str] = mapped_column(String(32))
    #: The rest of the question and of the plan: sample, labels, prediction, legs of each epoch …
    plan: Mapped[UpgradePlan] = mapped_column(PlanJson, default=UpgradePlan)
    #: Whether it is paused. Batches in work continue.
    paused: Mapped[bool] = mapped_column(default=False)
    #: When a command paused it. None if it only makes way for another upgrade.
    paused_at: Mapped[float | None]
    #: The `throttle.Limits` that a command set. None: each worker's own settings count. 0: no limit.
    rate: Mapped[float | None]
    nice: Mapped[float | None]
    p99_ms: Mapped[float | None]
    #: A sentence that says why it makes no progress, empty while it does.
    reason: Mapped[str] = mapped_column(Words, default="")
    #: The position of the copy of the original, a `copy_collection.CopyPosition`, and its epoch: writes in another epoch do not
    #: reach the copy.
    copying: Mapped[dict[str, Any] | None]
    #: The position of the comparison before cut-over, a `report.VerifyPosition`.
    verifying: Mapped[dict[str, Any] | None]
    #: The position of the work list: the collection being read, and how many of its records were.
    listing: Mapped[dict[str, Any] | None]
    #: Whether the work list is complete.
    listed: Mapped[bool] = mapped_column(default=False)
    #: The process that makes batches and changes phases, and until when it may.
    conductor: Mapped[str | None]
    conductor_until: Mapped[float | None]
    #: The leader token. It grows with every conductor, so a conductor that was replaced fails on it.
    leader_token: Mapped[int] = mapped_column("baton", BigInteger, key="leader_token", default=0)
    created_at: Mapped[float]
    ended_at: Mapped[float | None]

    @property
    def makes_way(self) -> bool:
        """Whether the command that supersedes it paused it, not `rmvdb pause`."""
        return self.paused and self.paused_at is None

    @property
    def original(self) -> str | None:
        """The collection that is kept whole for an instant roll back, while a copy of it is emptied."""
        legs = self.plan.epochs.get(EpochName.ORIGINAL)
        return legs[0].collection if legs else None

    @property
    def lift(self) -> str | None:
        """SHA-256 of h, if the copy holds the original's vectors lifted into the new space, and is re-embedded in place."""
        return self.plan.lift

    @property
    def in_place(self) -> bool:
        """Whether the collection that is filled holds the records already."""
        return self.new_collection in self.old_collections

    @property
    def made(self) -> list[str]:
        """The collections that are made for it, including the copy of a kept original. None for a roll back."""
        if self.undoes is not None:
            return []
        return list(dict.fromkeys([self.new_collection, *(self.old_collections if self.original else [])]))

    @property
    def leaving(self) -> list[str]:
        """The collections that clean-up drops."""
        kept = [self.original] if self.original and self.undoes is None else []
        return [*(each for each in self.old_collections if each != self.new_collection), *kept]


class PhaseRow(Table):
    """One event of an upgrade."""

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
    #: The lowest is first.
    priority: Mapped[int] = mapped_column(BigInteger)
    #: Packed by `codec.pack_ids`.
    ids: Mapped[bytes]
    count: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    worker: Mapped[str | None]
    #: The fencing token. It grows with every claim, so a worker that lost its lease fails on it.
    token: Mapped[int] = mapped_column(BigInteger, default=0)
    lease_until: Mapped[float | None]
    copied_at: Mapped[float | None]
    #: The listed batch from which its records were requeued, at any depth. None for a listed batch.
    root: Mapped[int | None] = mapped_column(BigInteger)
    #: Whether records of it were moved and are lost since. A record that no old collection holds is restored from the archive.
    restore: Mapped[bool] = mapped_column(default=False, server_default=false())
    #: The archive of the old records, by collection: path, SHA-256 and count of a Parquet file.
    archive: Mapped[dict[str, Any] | None]
    #: For a roll back: the files with the vectors to write, by the collection that they return to. None if no batch had decided
    #: to remove the records from it.
    origin: Mapped[dict[str, Any] | None]
    #: For a roll back: ids that stay as they are in the collection they return to. Decided before anything is written.
    left: Mapped[bytes | None]
    #: Decided before anything is removed, so that a rerun does the same: ids to remove from every old collection, to remove from
    #: the new one (another program deleted them from the old one), and to requeue (changed, or being written).
    remove: Mapped[bytes | None]
    remove_from_new: Mapped[bytes | None] = mapped_column("gone", key="remove_from_new")
    requeue: Mapped[bytes | None] = mapped_column("again", key="requeue")


class IntentRow(Table):
    """A client's announced write of one record."""

    __tablename__ = "intents"
    # An id is never reused: a write that is marked done late must not mark another one.
    __table_args__ = (
        Index("ix_intents_record", "gallery_id", "record"),
        # The few that are not done, among all writes of an upgrade.
        Index("ix_intents_open", "gallery_id", sqlite_where=text("done = 0"), postgresql_where=text("NOT done")),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"))
    #: The upgrade that needs it until the clean-up. None outside an upgrade.
    upgrade_id: Mapped[int | None] = mapped_column(ForeignKey("upgrades.id"), index=True)
    #: `codec.key(id)`.
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
    """A record that could not be re-embedded. Searches still find it in the old collection."""

    __tablename__ = "quarantined"
    __table_args__ = (UniqueConstraint("upgrade_id", "record"),)

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    upgrade_id: Mapped[int] = mapped_column(ForeignKey("upgrades.id"))
    record: Mapped[str] = mapped_column(Text)
    reason: Mapped[str] = mapped_column(Words)
    at: Mapped[float]


class AskedForRow(Table):
    """A record that a search asked for while it was not re-embedded. A worker moves it first."""

    __tablename__ = "asked_for"

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    upgrade_id: Mapped[int] = mapped_column(ForeignKey("upgrades.id"), index=True)
    #: `codec.key(id)`.
    record: Mapped[str] = mapped_column(Text)


class ClientRow(Table):
    """A process that searches. It is alive if it asked within its plan's maximum age."""

    __tablename__ = "clients"

    id: Mapped[str] = mapped_column(primary_key=True)
    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"), index=True)
    epoch: Mapped[int]
    #: The newest epoch that it can serve, and why it can't serve the next one.
    ready: Mapped[int]
    trouble: Mapped[str] = mapped_column(Words, default="")
    #: How many of its latest searches count, and the milliseconds in which 99 % of them ended.
    searches: Mapped[int]
    p99_ms: Mapped[float]
    #: `RescoreFigures.latest`. None if its searches were not rescored lately.
    rescoring: Mapped[dict[str, Any] | None]
    seen_at: Mapped[float]


class TraceRow(Table):
    """A gallery's trace, a number that only rises. The mark beside the data has it, too: a registry behind it has gone back."""

    __tablename__ = "traces"

    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"), primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(BigInteger, default=0)
    #: The largest epoch that a client served by and this registry doesn't know.
    reported: Mapped[int] = mapped_column(default=0)
    #: The evidence that this registry has gone back, empty if there is none.
    trouble: Mapped[str] = mapped_column(Words, default="")


class WorkerRow(Table):
    """A process that backfills, or a command that takes an upgrade's place."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(primary_key=True)
    upgrade_id: Mapped[int | None]
    #: A sentence that says what it waits for, empty if it waits for nothing.
    note: Mapped[str] = mapped_column(Words, default="")
    seen_at: Mapped[float]
    #: The same by the database's clock, for people: the registry's time stops while no process works.
    heard_at: Mapped[float]


class KeptQueryRow(Table):
    """A query that a client was asked, kept for the next plan."""

    __tablename__ = "kept_queries"
    __table_args__ = (Index(None, "gallery_id", "priority"),)

    id: Mapped[int] = mapped_column(Serial, primary_key=True)
    gallery_id: Mapped[int] = mapped_column(ForeignKey("galleries.id"))
    #: A random number from 0 to 1. The rows of the smallest ones stay.
    priority: Mapped[float]
    #: By the database's clock: the registry's time stops while no process works, and these rows live for weeks.
    asked_at: Mapped[float]
    #: How `payload` holds the item. See `codec.item_to_row`.
    kind: Mapped[str] = mapped_column(String(16))
    payload: Mapped[bytes]


#: The tables in the manifest, each after those that it refers to. rmvdb makes the work (batches, intents, quarantine) again from
#: the collections and the archive. Clients and workers report again, and keep new queries.
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
#: Columns of these tables that are valid for seconds only, or without which a step starts again.
TRANSIENT_COLUMNS = frozenset(
    {"closing_until", "served_since", "rebuilding", "conductor", "conductor_until", "copying", "listing", "verifying"}
)
