"""The records of an old collection that no batch has moved: another program wrote them there, or the engine went back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rmvdb.registry.codec import key, unpack_ids
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import BatchState, Id
from rmvdb.upgrade import keep_original, work_list
from rmvdb.upgrade.context import UpgradeContext
from rmvdb.upgrade.id_hashes import hashes, outside


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRecords:
    """The records of a page of an old collection that no batch has moved."""

    ids: list[Id]
    #: The ids that came back after a deletion, with that deletion's intent, which is still recorded.
    taken_in: Mapping[Id, int] = field(default_factory=dict)


def find_late(
    context: UpgradeContext, upgrade: UpgradeRow, collection: str, *, quarantined: bool = False
) -> Iterator[LateRecords]:
    """Find the late records of an old collection, a page at a time. Quarantined ones count only if you ask for them."""
    aside = set() if quarantined else {row.record for row in context.registry.quarantined(upgrade.id)}
    retired = _retired(context, upgrade) if upgrade.in_place else None
    for page in context.store.scan(collection, page=context.services.batch):
        context.check_stop()
        ids = [record.id for record in page if key(record.id) not in aside]
        if retired is None:
            yield _late_to_move(context, upgrade, collection, ids)
        else:
            yield _late_in_place(context, upgrade, ids, retired)


def _late_to_move(context: UpgradeContext, upgrade: UpgradeRow, collection: str, ids: Sequence[Id]) -> LateRecords:
    """Return the late records of a page: all but those that a newer one of the old collections holds. They are listed there."""
    newer = work_list.newer(context, upgrade, collection, ids)
    return LateRecords(ids=[id for id in ids if id not in newer])


def _late_in_place(
    context: UpgradeContext, upgrade: UpgradeRow, ids: Sequence[Id], retired: npt.NDArray[np.uint64]
) -> LateRecords:
    """Return the late records of a page in place: those that are still lifted. No batch and no client gave them the new model's
    own vector."""
    lifted = set(outside(retired, ids)) - keep_original.last_done(context, upgrade, ids).keys()
    taken_in = keep_original.taken_in_again(context, upgrade, ids)
    return LateRecords(ids=[id for id in ids if id in lifted or id in taken_in], taken_in=taken_in)


def _retired(context: UpgradeContext, upgrade: UpgradeRow) -> npt.NDArray[np.uint64]:
    """Return hashes of the ids that batches are done with."""
    parts, after = [np.empty(0, np.uint64)], 0
    while page := context.registry.batches(upgrade.id, after=after, state=BatchState.RETIRED):
        parts += [hashes(unpack_ids(row.remove)) for row in page]
        after = page[-1].id
    return np.concatenate(parts)
