"""An original that is kept whole for an instant roll back, and the collections beside it that must agree with it."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from rmvdb.planning.sample import vectors_of
from rmvdb.registry.codec import key
from rmvdb.registry.intents import CONDUCTOR
from rmvdb.registry.tables import UpgradeRow
from rmvdb.serving.announced_writes import Writes
from rmvdb.types import Id, Record, Vectors
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.copy_collection import Mirror

#: Records of the original that are copied in one announced write.
COPIED_AT_ONCE = 500


def beside(upgrade: UpgradeRow) -> list[str]:
    """Return the collections beside the original, each once: in place, the old and the new one are the same."""
    return list(dict.fromkeys([upgrade.new_collection, *upgrade.old_collections]))


def mirror(context: UpgradeContext, upgrade: UpgradeRow) -> Mirror:
    """Return a mirror of the original that writes into the collections beside it as a client would."""
    name = f"{CONDUCTOR}{upgrade.id}:{uuid.uuid4().hex[:8]}"
    writes = Writes(context.gallery.name, registry=context.registry, name=name, engine_timeout=context.services.engine_timeout)
    assert upgrade.original is not None  # noqa: S101 (the caller looked)
    lift = functools.partial(_lifted, context, upgrade.lift, upgrade.plan.question["side"]) if upgrade.lift else None
    done = functools.partial(last_done, context, upgrade)
    forgetting_writes = functools.partial(_forgetting_writes, context, upgrade)
    return Mirror(
        upgrade.original,
        store=context.store,
        writes=writes,
        done=done,
        forgetting_writes=forgetting_writes,
        page=COPIED_AT_ONCE,
        lift=lift,
    )


def agree(context: UpgradeContext, upgrade: UpgradeRow) -> None:
    """Let the collections beside the original hold the same records as the original again."""
    mirror(context, upgrade).agree(beside(upgrade), context.check_stop)


def last_done(context: UpgradeContext, upgrade: UpgradeRow, ids: Sequence[Id]) -> dict[Id, str]:
    """Return the kind of the last done write, "upsert" or "delete", of each record that a client wrote during the upgrade."""
    kinds = context.registry.last_done(upgrade.id, ids)
    return {id: kinds[key(id)] for id in ids if key(id) in kinds}


def taken_in_again(context: UpgradeContext, upgrade: UpgradeRow, ids: Sequence[Id]) -> dict[Id, int]:
    """Return restored ids whose deletion intent is still recorded, with that intent's id.

    A conductor took them in again, and was killed before it forgot the deletion.
    """
    decided = context.registry.intents(upgrade.id, ids)
    rows = ((id, decided[key(id)]) for id in ids if key(id) in decided)
    return {id: row.id for id, row in rows if row.done and row.kind == "delete" and row.client.startswith(CONDUCTOR)}


def late_records(context: UpgradeContext, upgrade: UpgradeRow) -> int:
    """Count the records that other programs put there. Do not count records that a killed client was inserting."""
    late = 0
    for ids in mirror(context, upgrade).unknown([upgrade.new_collection]):
        announced = context.registry.announced(upgrade.id, ids).values()
        late += len(ids) - sum(not intent.done for intent in announced)
    return late


@contextmanager
def _forgetting_writes(context: UpgradeContext, upgrade: UpgradeRow, ids: Sequence[Id]) -> Iterator[None]:
    upto = context.registry.last_intent(
        context.gallery.id
    )  # no other process writes these records now, so no later write is deleted here
    if upgrade.in_place:  # no collection shows which records are still lifted
        context.registry.add_late(upgrade.id, ids, batch=context.services.batch)
    yield
    context.registry.forget_done(upgrade.id, ids, upto=upto)  # only now: a kill would lose the note of a deletion


def _lifted(context: UpgradeContext, lift: str, side: str | None, records: Sequence[Record]) -> Vectors:
    """Return the vectors (n, d_new) that h makes of records of the original."""
    known = [record.fields.get(side) if side else None for record in records]
    return context.services.loaded_models.lift(lift, np.stack(vectors_of(records)), known)
