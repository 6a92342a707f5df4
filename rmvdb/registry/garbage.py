"""Rows of the registry that no upgrade, worker or client needs any more."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, select
from sqlalchemy.orm import Session

from rmvdb.registry import shared_queries
from rmvdb.registry.clock import DAY, clock, day
from rmvdb.registry.session import Database, transaction
from rmvdb.registry.tables import (
    ArtifactPartRow,
    ArtifactRow,
    AskedForRow,
    BatchRow,
    ClientRow,
    CollectionRow,
    GalleryRow,
    IntentRow,
    KeptQueryRow,
    PlanRow,
    QuarantineRow,
    Table,
    UpgradeRow,
    VersionRow,
    WorkerRow,
)
from rmvdb.types import Phase

#: The name of an artifact inside any text.
SHA256 = re.compile(r"\b[0-9a-f]{64}\b")


class Garbage(Database):
    """Rows that rmvdb may delete."""

    @transaction
    def needed_upgrades(self, s: Session, /) -> set[int]:
        """Return the upgrades that have not ended, and those that they undo or supersede."""
        return shared_queries.needed_upgrades(s)

    @transaction
    def artifacts_in_use(self, s: Session, /) -> set[str]:
        """Return the SHA-256 of each artifact that a serving plan, a model version or an upgrade, ended or not, refers to."""
        return _in_use(s)

    @transaction
    def collect(self, s: Session, /, *, older: float, spared: set[str], queries_days: float, remove: bool) -> dict[str, int]:
        """Count the rows of each kind that nothing needs and that are over `older` seconds old. Delete them if `remove`.

        `spared`: artifacts that something outside the registry refers to. `queries_days`: the days for which queries are kept.
        """
        for gallery in s.scalars(select(GalleryRow).order_by(GalleryRow.id).with_for_update(key_share=True)):
            if gallery.rebuilding:
                return {}
        counts = {}
        for name, (table, which) in _kinds(s, older, spared, queries_days).items():
            counts[name] = s.scalar(select(func.count()).select_from(table).where(which)) or 0
            if remove and counts[name] and table is ArtifactRow:
                gone = select(ArtifactRow.sha256).where(which)
                parts = delete(ArtifactPartRow).where(ArtifactPartRow.sha256.in_(gone))
                s.execute(parts.execution_options(synchronize_session=False))
            if remove and counts[name]:
                shared_queries.piecewise(s, delete(table), which)
        return counts


def _kinds(s: Session, older: float, spared: set[str], queries_days: float) -> dict[str, tuple[type[Table], ColumnElement[bool]]]:
    before, dated = clock() - older, day(s) - older  # the registry's time stops while no process works
    needed = shared_queries.needed_upgrades(s)
    on = select(UpgradeRow.gallery_id).where(UpgradeRow.phase != Phase.ENDED)
    ended = select(UpgradeRow.id).where(UpgradeRow.ended_at < dated, UpgradeRow.id.not_in(needed))
    # A plan may allow a client a longer silence.
    longest = s.scalar(select(func.max(PlanRow.max_age))) or 0.0
    free = and_(IntentRow.upgrade_id.is_(None), IntentRow.gallery_id.not_in(on), IntentRow.deadline < before)
    return {
        "clients that ended without a word": (ClientRow, ClientRow.seen_at < before - longest),
        "workers that ended without a word": (WorkerRow, WorkerRow.heard_at < dated),
        "dropped collections": (
            CollectionRow,
            and_(CollectionRow.dropped_at < dated, CollectionRow.name.not_in(_collections(s, needed))),
        ),
        "batches of ended upgrades": (BatchRow, BatchRow.upgrade_id.in_(ended)),
        "quarantined records of ended upgrades": (QuarantineRow, QuarantineRow.upgrade_id.in_(ended)),
        "records asked for in ended upgrades": (AskedForRow, AskedForRow.upgrade_id.in_(ended)),
        "writes that no upgrade needs": (IntentRow, IntentRow.upgrade_id.in_(ended) | free),
        "kept queries that are too old": (KeptQueryRow, KeptQueryRow.asked_at < day(s) - queries_days * DAY),
        "artifacts": (
            ArtifactRow,
            and_(ArtifactRow.created_at < dated, ArtifactRow.sha256.not_in(_in_use(s) | spared)),
        ),
    }


def _collections(s: Session, needed: set[int]) -> set[str]:
    """Return the collections that a plan, in force or announced, searches or writes to, or that a needed upgrade works on."""
    names = set[str]()
    for gallery in s.scalars(select(GalleryRow)):
        for epoch in filter(None, (gallery.epoch, gallery.next_epoch)):
            names |= {leg.collection for leg in shared_queries.plan(s, gallery, epoch).write_targets}
    for row in s.scalars(select(UpgradeRow).where(UpgradeRow.id.in_(needed))):
        names |= {*row.old_collections, *row.made, row.new_collection, *filter(None, [row.original])}
    return names


def _in_use(s: Session) -> set[str]:
    columns = select(UpgradeRow.plan, UpgradeRow.phase)
    plans = [plan if phase != Phase.ENDED else replace(plan, answered=None) for plan, phase in s.execute(columns)]
    values: list[Any] = [*(plan.to_json() for plan in plans), *s.scalars(select(PlanRow.legs))]
    heads = filter(None, s.scalars(select(VersionRow.head)))
    return {*SHA256.findall(json.dumps(values)), *heads}
