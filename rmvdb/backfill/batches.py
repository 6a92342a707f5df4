"""One batch, from claimed to retired.

A batch moves in the order of `BatchState`. The order of its calls is the safety: at every crash point a record is in both
collections or in one of them, never in none, and running a batch again changes nothing.
"""

from __future__ import annotations

from rmvdb.backfill.copy import Copying
from rmvdb.backfill.retire import Retiring


class Backfill(Copying, Retiring):
    """The two halves of a batch: `copy` fills the new collection, `retire` empties the old ones after a grace."""

    #: The calls by which a batch changes something outside this process, in order. Tests kill it before and after each of them.
    CALLS = (
        "registry.claim",
        "archive.write",
        "registry.advance writing",
        "store.upsert new",
        "registry.copied",
        "registry.advance removing",
        "store.upsert mark",
        "archive.leave",
        "store.delete new",
        "store.delete old",
        "registry.retire",
    )
