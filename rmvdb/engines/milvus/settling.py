"""Whether searches find what was written: flushed segments, and their index."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rmvdb.engines.milvus.describing import schema_of, vector_index
from rmvdb.engines.milvus.driver import ONCE
from rmvdb.engines.milvus.querying import rows_of
from rmvdb.engines.milvus.session import Session
from rmvdb.errors import EngineUnavailable
from rmvdb.types import Segments

if TYPE_CHECKING:
    from rmvdb.engines.milvus.driver import MilvusClient

#: Seconds in which a flushed collection must be indexed and loaded.
_INDEXED_AFTER = 1800.0
#: Rows that a server searches one by one where it has no index of them: measured on 2.3.5, of 2,500 fresh rows a search with a
#: filter and a far vector missed none, of 4,500 60.
_EXACT = 2_500
#: Rows of a segment below which a server makes no index of it (`indexCoord.segment.minSegmentNumRowsToEnableIndex`).
_SMALL = 1_024


def settle(session: Session, collection: str, *, coming: int = 0, report: Callable[[int, int], None] = lambda *_: None) -> None:
    """Flush, and wait until searches find every record that was written before this call, with a filter and without.

    `coming`: how many rows are about to be written. What searches read one by one now they no longer do once it has grown by
    many, so that all of it must have its index. `report` hears how many rows are indexed, and of how many. Raises
    EngineUnavailable where they are not in half an hour.
    """
    if session.engine().lite2:
        return
    written = _rows(session, collection)
    session.run(collection, lambda client: client.flush(collection, **ONCE), patient=True)
    if session.engine().name == "milvus-lite":
        return
    mine = _look(session, collection)[0].keys()
    bound, deadline = max(_EXACT - coming, 0), time.monotonic() + _INDEXED_AFTER
    while True:
        flushed, reached = _look(session, collection)
        indexed = sum(count for segment, count in flushed.items() if segment in reached)
        left = sum(count for segment, count in flushed.items() if segment in mine and segment not in reached)
        # A flush leaves out what another process's flush has in hand, and what segments became of which it made one.
        if max(left, written - indexed) <= bound:
            return
        report(min(indexed, written), written)
        if time.monotonic() > deadline:
            raise EngineUnavailable(
                f"Milvus at {session.place()} has indexed {indexed} of {written} rows of {collection!r} after "
                f"{_INDEXED_AFTER:g} s; look at its index nodes and their log, then run the same command again"
            )
        time.sleep(0.5)
        written = min(written, _rows(session, collection))  # some may have been deleted since


def segments(session: Session, collection: str) -> Segments:
    """How many flushed rows the collection has, and how many of them searches reach through a loaded index."""
    if session.engine().name == "milvus-lite":
        return Segments()
    flushed, reached = _look(session, collection)
    indexed = sum(count for segment, count in flushed.items() if segment in reached)
    return Segments(rows=sum(flushed.values()), indexed=indexed, exact=_EXACT)


def _look(session: Session, collection: str) -> tuple[dict[int, int], set[int]]:
    """The flushed segments with their rows; and those that searches reach through an index, or need none for.

    One by one: what several segments held and one holds now may be loaded twice for a while.
    """
    field = schema_of(session, collection).vector_field

    def look(client: MilvusClient) -> tuple[dict[int, int], set[int]]:
        exact = vector_index(client, collection, field).get("index_type") == "FLAT"  # nothing is built: searches read all vectors
        flushed = {each.segment_id: each.num_rows for each in client.list_persistent_segments(collection, **ONCE)}
        loaded = client.list_loaded_segments(collection, **ONCE)
        return flushed, {each.segment_id for each in loaded if exact or each.index_name or each.num_rows < _SMALL}

    return session.run(collection, look)


def _rows(session: Session, collection: str) -> int:
    return session.run(collection, lambda client: rows_of(client, collection))
