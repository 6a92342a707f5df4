"""Whether searches find written records: flushed segments and their index."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from rmvdb.engines.milvus.describing import schema_of, vector_index
from rmvdb.engines.milvus.driver import ONCE
from rmvdb.engines.milvus.querying import rows_of
from rmvdb.engines.milvus.session import Session
from rmvdb.errors import EngineUnavailable
from rmvdb.types import Segments

if TYPE_CHECKING:
    from rmvdb.engines.milvus.driver import MilvusClient

#: Seconds within which a collection must be flushed, and then indexed and loaded.
_INDEXED_AFTER = 1800.0
#: Seconds for which a flush waits for more rows.
_MORE_WITHIN = 10.0
#: The most unflushed rows that a server searches one by one. 2.3.5 looks at a part of 5,000 rows of 768 dimensions, and of more
#: rows if they have fewer (`tests/bench/small_flushes.py`).
_EXACT = 2_500
#: From this many rows on, a server indexes a segment (`indexCoord.segment.minSegmentNumRowsToEnableIndex`).
_INDEXED = 1_024
#: From this many rows on, a server looks at a part of a flushed segment without an index: it keeps lists of 39 rows each and
#: reads the nearest 16 (`queryNode.segcore.interimIndex.nprobe`). Filtered searches miss some rows of a segment between the two.
_PARTLY = 663


class _State(NamedTuple):
    """An engine's answer about a collection's flushed segments."""

    #: Rows by segment, including replaced and deleted ones.
    rows: dict[int, int]
    #: The segments in which searches find every row.
    reached: set[int]
    #: The fewest flushed rows that are enough for an index in each shard.
    enough: int

    @property
    def waiting(self) -> dict[int, int]:
        """The rows of segments that will get an index and have none yet."""
        return {id: rows for id, rows in self.rows.items() if id not in self.reached and rows >= _INDEXED}


def settle(
    session: Session,
    collection: str,
    *,
    coming: int = 0,
    missed: bool = False,
    report: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Wait until searches, with and without a filter, find every record that was written before this call.

    On a server, rows are flushed only once they are enough for an index: it looks at a part of smaller segments, and 2.3.5
    forgets deletions if it restarts after many small flushes. It searches fewer, unflushed rows one by one.

    `coming`: how many rows are about to be written besides. `missed`: a search has missed some, so all are flushed. `report` gets
    the number of indexed rows, and of all.

    Raises:
        EngineUnavailable: The rows have no index after half an hour.
    """
    engine = session.engine()
    if engine.lite2:
        return
    if engine.name == "milvus-lite":
        _flush(session, collection)
        return
    if _read_whole(session, collection):
        _rows(session, collection)  # at Strong: it waits for all writes
        return
    if _flush_enough(session, collection, coming, missed):
        _wait_for_index(session, collection, coming, report)


def segments(session: Session, collection: str) -> Segments:
    """Return how many rows the collection has flushed and not flushed, and how many wait for a loaded index."""
    if session.engine().name == "milvus-lite" or _read_whole(session, collection):
        return Segments()
    state = _look(session, collection)
    partly = sum(rows for segment, rows in state.rows.items() if segment not in state.reached and _PARTLY <= rows < _INDEXED)
    flushed = sum(state.rows.values())
    fresh = max(_rows(session, collection) - flushed, 0)
    return Segments(rows=flushed, waiting=sum(state.waiting.values()), partly=partly, fresh=fresh, exact=_EXACT)


def _wait_for_index(session: Session, collection: str, coming: int, report: Callable[[int, int], None]) -> None:
    state, deadline = _look(session, collection), time.monotonic() + _INDEXED_AFTER
    mine = session.flushed[collection] = set(state.rows)
    while True:
        if not mine <= state.rows.keys():  # the engine merged some of them into others of these
            mine = set(state.rows)
        left = sum(rows for segment, rows in state.waiting.items() if segment in mine)
        if left <= max(_EXACT - coming, 0):
            return
        total = sum(state.rows.values())
        report(total - left, total)
        if time.monotonic() > deadline:
            raise EngineUnavailable(
                f"Milvus at {session.place()} has indexed {total - left} of {total} rows of {collection!r} after "
                f"{_INDEXED_AFTER:g} s; look at its index nodes and their log, then run the same command again"
            )
        time.sleep(0.5)
        state = _look(session, collection)


def _flush_enough(session: Session, collection: str, coming: int, missed: bool) -> bool:
    """Flush if there are enough rows, else wait for them; return whether to wait for an index.

    Rows that stay unflushed are few, and the engine searches them one by one.
    """
    patience = time.monotonic() + _MORE_WITHIN
    while True:
        state = _look(session, collection)
        if not state.rows.keys() <= session.flushed.get(collection, state.rows.keys()):
            session.unflushed[collection] = 0  # another process has flushed since, or the engine has merged segments
        session.flushed[collection] = set(state.rows)
        # Replaced rows of flushed segments hide as many fresh ones, but this process knows its own.
        fresh = max(_rows(session, collection) - sum(state.rows.values()), session.unflushed.get(collection, 0))
        if missed or fresh >= state.enough:
            _flush(session, collection)
            return True
        if fresh + coming <= _EXACT or time.monotonic() > patience:
            return bool(state.waiting)
        time.sleep(0.5)


def _flush(session: Session, collection: str) -> None:
    session.unflushed[collection] = 0

    def flush(client: MilvusClient) -> None:
        # pymilvus asks again and again, without end, whether the flush is over.
        late = threading.Timer(_INDEXED_AFTER, session.end, [client])
        late.daemon = True
        late.start()
        try:
            client.flush(collection, **ONCE)
        finally:
            late.cancel()

    session.run(collection, flush, patient=True)


def _read_whole(session: Session, collection: str) -> bool:
    """Return whether searches look at all vectors, because the index is FLAT and nothing is built."""
    field = schema_of(session, collection).vector_field
    return session.run(collection, lambda client: vector_index(client, collection, field).get("index_type") == "FLAT")


def _look(session: Session, collection: str) -> _State:
    """Read the segments one by one: after a merge, a row may be loaded twice for a while."""

    def look(client: MilvusClient) -> _State:
        flushed = {each.segment_id: each.num_rows for each in client.list_persistent_segments(collection, **ONCE)}
        loaded = client.list_loaded_segments(collection, **ONCE)
        reached = {each.segment_id for each in loaded if each.index_name or each.num_rows < _PARTLY}
        shards = client.describe_collection(collection, **ONCE).get("num_shards", 1)
        return _State(flushed, reached, enough=_INDEXED if shards == 1 else shards * _INDEXED * 5 // 4)

    return session.run(collection, look)


def _rows(session: Session, collection: str) -> int:
    return session.run(collection, lambda client: rows_of(client, collection))
