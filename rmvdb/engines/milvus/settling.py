"""Whether searches find what was written: flushed segments, and their index."""

from __future__ import annotations

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

#: Seconds in which a flushed collection must be indexed and loaded.
_INDEXED_AFTER = 1800.0
#: Seconds for which a flush waits for more rows to be written.
_MORE_WITHIN = 10.0
#: Rows that were not flushed and that a server searches one by one. Measured on 2.3.5: it looks at a part of 4,992 and more.
_EXACT = 2_500
#: Rows of a segment from which on a server makes an index of it (`indexCoord.segment.minSegmentNumRowsToEnableIndex`).
_INDEXED = 1_024
#: Rows of a flushed segment without an index from which on a server looks at a part of them: it keeps lists of 39 rows each and
#: reads the nearest 16 (`queryNode.segcore.interimIndex.nprobe`). Of a segment between these two a filtered search misses a part.
_PARTLY = 663


class _State(NamedTuple):
    """What an engine says of a collection's flushed segments."""

    #: Their rows, replaced and deleted ones among them.
    rows: dict[int, int]
    #: Those in which searches find every row.
    reached: set[int]
    #: The fewest rows that, once flushed, are enough for an index in each shard.
    enough: int

    @property
    def waiting(self) -> dict[int, int]:
        """Those that get an index and have none yet, with their rows."""
        return {id: rows for id, rows in self.rows.items() if id not in self.reached and rows >= _INDEXED}


def settle(
    session: Session,
    collection: str,
    *,
    coming: int = 0,
    missed: bool = False,
    report: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Wait until searches find every record that was written before this call, with a filter and without.

    A server flushes only rows that are enough for an index: it looks at a part of smaller segments, and 2.3.5 forgets deletions
    when it is restarted after many small flushes. Fewer rows it searches one by one where they are. `coming`: how many rows are
    about to be written beside them. `missed`: a search has missed some, so that all are flushed. `report` hears how many rows are
    indexed, and of how many. Raises EngineUnavailable where they are not in half an hour.
    """
    engine = session.engine()
    if engine.lite2:
        return
    if engine.name == "milvus-lite":
        _flush(session, collection)
        return
    if _read_whole(session, collection):
        _rows(session, collection)  # at Strong: it waits for all that was written
        return
    if not _flush_enough(session, collection, coming, missed):
        return
    state, deadline = _look(session, collection), time.monotonic() + _INDEXED_AFTER
    mine = session.flushed[collection] = set(state.rows)
    while True:
        if not mine <= state.rows.keys():  # some were merged, into some of these
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


def segments(session: Session, collection: str) -> Segments:
    """How many flushed rows the collection has, and how many of them searches reach through a loaded index."""
    if session.engine().name == "milvus-lite" or _read_whole(session, collection):
        return Segments()
    state = _look(session, collection)
    partly = sum(rows for segment, rows in state.rows.items() if segment not in state.reached and _PARTLY <= rows < _INDEXED)
    return Segments(rows=sum(state.rows.values()), waiting=sum(state.waiting.values()), partly=partly, exact=_EXACT)


def _flush_enough(session: Session, collection: str, coming: int, missed: bool) -> bool:
    """Whether rows were flushed, or need not be: those that are not flushed are then few, and searched one by one."""
    patience = time.monotonic() + _MORE_WITHIN
    while True:
        state = _look(session, collection)
        if not state.rows.keys() <= session.flushed.get(collection, state.rows.keys()):
            session.unflushed[collection] = 0  # another process has flushed since, or segments were merged
        session.flushed[collection] = set(state.rows)
        # Replaced rows of flushed segments hide as many fresh ones; this process knows of its own.
        fresh = max(_rows(session, collection) - sum(state.rows.values()), session.unflushed.get(collection, 0))
        if missed or fresh >= state.enough:
            _flush(session, collection)
            return True
        if fresh + coming <= _EXACT or time.monotonic() > patience:
            return bool(state.waiting)
        time.sleep(0.5)


def _flush(session: Session, collection: str) -> None:
    session.unflushed[collection] = 0
    session.run(collection, lambda client: client.flush(collection, **ONCE), patient=True)


def _read_whole(session: Session, collection: str) -> bool:
    """Whether searches look at all vectors: nothing is built, of no segment."""
    field = schema_of(session, collection).vector_field
    return session.run(collection, lambda client: vector_index(client, collection, field).get("index_type") == "FLAT")


def _look(session: Session, collection: str) -> _State:
    """One by one: what several segments held and one holds now may be loaded twice for a while."""

    def look(client: MilvusClient) -> _State:
        flushed = {each.segment_id: each.num_rows for each in client.list_persistent_segments(collection, **ONCE)}
        loaded = client.list_loaded_segments(collection, **ONCE)
        reached = {each.segment_id for each in loaded if each.index_name or each.num_rows < _PARTLY}
        shards = client.describe_collection(collection, **ONCE).get("num_shards", 1)
        return _State(flushed, reached, enough=_INDEXED if shards == 1 else shards * _INDEXED * 5 // 4)

    return session.run(collection, look)


def _rows(session: Session, collection: str) -> int:
    return session.run(collection, lambda client: rows_of(client, collection))
