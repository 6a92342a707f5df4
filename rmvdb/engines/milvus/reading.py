"""Reading: records by id, all records page by page, and their number."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from rmvdb.canonical.ids import INT64_BOUNDS, checked_ids
from rmvdb.engines.filters import EngineFilter, between, both, ids_in
from rmvdb.engines.filters.words import BREAKS, around
from rmvdb.engines.milvus.describing import schema_of
from rmvdb.engines.milvus.querying import query
from rmvdb.engines.milvus.rows import MESSAGE, WINDOW, output_of, record_of, weight_of
from rmvdb.engines.milvus.session import BOUNDED, STRONG, Session, consistency
from rmvdb.errors import AnswerTooLarge, EngineError
from rmvdb.types import Id, IdType, Moment, Record, Schema

#: The most rows of one call, and the rows of the first call, before their size is known.
_ROWS, _FEW = 1_000, 100
#: Pages of a scan that are read before they are asked for.
_AHEAD = 2


def get(
    session: Session,
    collection: str,
    ids: Sequence[Id],
    *,
    filter: str | None = "",
    fields: Sequence[str] | None = None,
    vector: bool = False,
    strong: bool = True,
    after: Moment | None = None,
) -> list[Record]:
    """Return the records of these ids that exist and match, each once, in the order of `ids`; `fields=None` gives all fields."""
    schema = schema_of(session, collection)
    wanted = checked_ids(ids, schema)
    condition, level = session.engine_filter(filter, schema), consistency(strong=strong, after=after)
    return _get(session, schema, wanted, condition, fields=fields, vector=vector, level=level)


def _get(
    session: Session,
    schema: Schema,
    wanted: Sequence[Id],
    condition: EngineFilter,
    *,
    fields: Sequence[str] | None,
    vector: bool,
    level: Mapping[str, Any] = STRONG,
) -> list[Record]:
    read = fields if fields is None else [*fields, *condition.fields]
    output = [*output_of(schema, read), *([schema.vector_field] if vector else [])]
    kind = (schema.collection, *output)
    found: dict[Id, Record] = {}
    start, most = 0, _ROWS
    while start < len(wanted):
        part = wanted[start : start + min(most, _rows_at_once(session, schema, kind))]
        wanted_here = both(condition.text, _these(session, schema, part))
        try:
            rows = _query(session, schema, wanted_here, output=output, level=level, filter=condition.text)
        except AnswerTooLarge:  # engines count each row as the average of all rows, however small these are
            if len(part) == 1:
                raise
            most = len(part) // 2
            continue
        found |= {
            row[schema.id_field]: record_of(schema, fields, row) for row in rows if condition.test is None or condition.test(row)
        }
        if rows:
            session.weights[kind] = max(1, sum(weight_of(schema, row) for row in rows) // len(rows))
        start += len(part)
    return [found[id] for id in wanted if id in found]


def _these(session: Session, schema: Schema, ids: Sequence[Id]) -> str:
    """Return an expression that is true for these ids. On Milvus Lite 2.5 it may be true for some others, too."""
    broken = [id for id in ids if _breaks(id)] if session.engine().lite2 else []
    plain = [id for id in ids if id not in broken] if broken else ids
    parts = [ids_in(schema.id_field, plain)] if plain else []
    return " or ".join(parts + [around(schema.id_field, str(id)) for id in broken])


def _breaks(id: Id) -> bool:
    return isinstance(id, str) and not BREAKS.isdisjoint(id)


def scan(
    session: Session,
    collection: str,
    *,
    filter: str | None = "",
    fields: Sequence[str] | None = (),
    vector: bool = False,
    after: Id | None = None,
    upto: Id | None = None,
    page: int = 1000,
    ahead: bool = False,
) -> Iterator[list[Record]]:
    """Yield every record in ascending id order, each once, in pages, with `after < id <= upto`; bounded by a few pages.

    It reads up to 16,384 ids ahead, one range at a time that is proven to be whole. Their records come page by page. A page is
    short only if no record follows: later records fill in for records that were deleted meanwhile or no longer match.

    A strong call waits for the engine's clock. With `ahead` only the reading of a range is strong, and its records show every
    write before that reading began. From the second page on, pages are then read at the same time, and so is the next range.
    """
    schema = schema_of(session, collection)
    condition, ready = session.engine_filter(filter, schema), list[Record]()
    bare = not vector and fields is not None and not fields and condition.test is None

    def read(part: _Part) -> list[Record]:
        if bare:
            return [Record(id=id) for id in part.ids]
        level = consistency(strong=not ahead, after=part.moment)
        return _get(session, schema, part.ids, condition, fields=fields, vector=vector, level=level)

    windows = _windows(session, schema, condition.text, after, upto)
    with _threads(session) if ahead else contextlib.nullcontext() as pool:
        for records in _in_order(_parts(session, windows, page, pool), read, pool):
            ready += records
            while len(ready) >= page:
                yield ready[:page]
                ready = ready[page:]
    if ready:
        yield ready


class _Part(NamedTuple):
    """The ids of a page, and a moment before their range was read."""

    ids: list[Id]
    moment: Moment


@contextlib.contextmanager
def _threads(session: Session) -> Iterator[ThreadPoolExecutor | None]:
    """Give threads that read ahead. None for Milvus Lite, which has no clock to wait for."""
    if session.settles_at_once:
        yield None
        return
    pool = ThreadPoolExecutor(_AHEAD + 1, thread_name_prefix="rmvdb-scan")
    try:
        yield pool
    finally:  # a caller may stop in the middle, and must not wait then
        pool.shutdown(wait=False, cancel_futures=True)


def _parts(session: Session, windows: Iterator[_Window], page: int, pool: ThreadPoolExecutor | None) -> Iterator[_Part]:
    """Yield the ids of each page. The next range is read once the second page of this one is asked for."""

    def window() -> tuple[Moment, list[Id]]:
        moment = session.moment() if pool else 0
        return moment, next(windows, _NOTHING).ids

    moment, ids = window()
    while ids:
        later = None
        for start in range(0, len(ids), page):
            if start and later is None and pool is not None:
                later = pool.submit(window)
            yield _Part(ids[start : start + page], moment)
        moment, ids = later.result() if later else window()


def _in_order(
    parts: Iterator[_Part], read: Callable[[_Part], list[Record]], pool: ThreadPoolExecutor | None
) -> Iterator[list[Record]]:
    """Yield the records of each part, in order. The first is read alone, because many readers take no more."""
    reading: deque[Future[list[Record]]] = deque()
    for number, part in enumerate(parts):
        if pool is None or not number:
            yield read(part)
            continue
        reading.append(pool.submit(read, part))
        if len(reading) > _AHEAD:
            yield reading.popleft().result()
    while reading:
        yield reading.popleft().result()


def count(session: Session, collection: str, *, filter: str | None = "") -> int:
    """Return how many distinct ids match, at strong consistency.

    Up to 16,384 ids are counted one by one. Above that, `count(*)` is correct if the first 16,384 ids stand for as many rows.
    If not, the collection has duplicated keys, and every id is read. The same happens if the engine cannot express the filter
    exactly.
    """
    schema = schema_of(session, collection)
    condition = session.engine_filter(filter, schema)
    if condition.test is not None:
        return sum(len(page) for page in scan(session, collection, filter=filter, page=WINDOW))
    windows = _windows(session, schema, condition.text, None, None)
    first = next(windows, _NOTHING)
    if first.last:
        return len(first.ids)
    if first.rows == len(first.ids):
        return _rows(session, schema, condition.text, None, None)
    return len(first.ids) + sum(len(window.ids) for window in windows)


def unservable(session: Session, collection: str) -> Id | None:
    """Return an id that another program wrote and that rmvdb could not read again or delete. None if there is none."""
    schema = schema_of(session, collection)
    if schema.id_type is IdType.INT64:
        low, high = INT64_BOUNDS
        edges = f"{schema.id_field} <= {low + 1} or {schema.id_field} >= {high - 1}"  # no engine reads the bounds themselves
        rows = _query(session, schema, edges, output=[schema.id_field])
        return next((row[schema.id_field] for row in rows if not low < row[schema.id_field] < high), None)
    banned = set(session.engine().limits.not_in_ids)
    windows = _windows(session, schema, "", None, None) if banned else iter(())
    return next((id for window in windows for id in window.ids if banned.intersection(str(id))), None)


def _rows_at_once(session: Session, schema: Schema, kind: tuple[str, ...]) -> int:
    """Return how many rows of these fields fit into one answer, by the size of the last ones; a few if none was read yet."""
    if kind[1:] == (schema.id_field,):
        return _ROWS
    weight = session.weights.get(kind, MESSAGE // _FEW)
    return max(1, min(_ROWS, MESSAGE // weight))


class _Window(NamedTuple):
    #: Every id of a range, ascending.
    ids: list[Id]
    #: How many rows these ids stand for.
    rows: int
    #: Whether no id follows.
    last: bool


_NOTHING = _Window([], 0, last=True)


def _windows(session: Session, schema: Schema, filter: str, after: Id | None, upto: Id | None) -> Iterator[_Window]:
    """Yield whole ranges of ids, ascending.

    An engine may give any rows for a limited query. So a range is whole only once its `count(*)` agrees. If it does not, a
    smaller range is read that fits into one answer.
    """
    while True:
        window = _window(session, schema, filter, after, upto)
        if window.ids:
            yield window
            after = window.ids[-1]
        if window.last:
            return


def _window(session: Session, schema: Schema, filter: str, after: Id | None, upto: Id | None) -> _Window:
    ids = _ids(session, schema, filter, after, upto)
    if len(ids) < WINDOW:
        rows = _rows(session, schema, filter, after, upto) if ids else 0
        if rows <= WINDOW:
            return _Window(ids, rows, last=True)
    while True:
        end = _end(ids)
        ids = ids[: ids.index(end) + 1]
        rows = _rows(session, schema, filter, after, end)
        if rows <= len(ids) or len(ids) == 1:
            return _Window(ids, rows, last=False)
        if rows <= WINDOW:
            return _Window(_ids(session, schema, filter, after, end), rows, last=False)
        # Aim at four fifths of a window: the ids at hand are a sample of those in the range.
        end = _end(ids[: 1 + min(len(ids) - 2, len(ids) * WINDOW * 4 // (rows * 5))])
        ids = _ids(session, schema, filter, after, end) or ids[:1]


def _end(ids: Sequence[Id]) -> Id:
    """Return the last id at which a range may end: one without a line break, if any, because Milvus Lite 2.5 reads none."""
    return next((id for id in reversed(ids) if not _breaks(id)), ids[-1])


def _ids(session: Session, schema: Schema, filter: str, after: Id | None, upto: Id | None) -> list[Id]:
    within = between(schema.id_field, after, upto) or _every(schema)
    rows = _query(session, schema, both(filter, within), output=[schema.id_field], filter=filter)
    found = sorted({row[schema.id_field] for row in rows})
    # Otherwise a scan would get the same page for ever.
    if (after is not None and found[:1] and found[0] <= after) or (upto is not None and found[-1:] and found[-1] > upto):
        raise EngineError(
            f"Milvus at {session.place()} was asked for the ids of {schema.collection!r} after {after!r} up to {upto!r} and gave "
            f"{found[0]!r} to {found[-1]!r}; look at its version and its log"
        )
    return found


def _rows(session: Session, schema: Schema, filter: str, after: Id | None, upto: Id | None) -> int:
    within = between(schema.id_field, after, upto)
    rows = _query(session, schema, both(filter, within), output=["count(*)"], filter=filter)
    return int(rows[0]["count(*)"]) if rows else 0


def _every(schema: Schema) -> str:
    """Return an expression that holds for every id, because a query must have one."""
    return f'{schema.id_field} >= ""' if schema.id_type is IdType.VARCHAR else f"{schema.id_field} >= {INT64_BOUNDS[0] + 1}"


def _query(
    session: Session,
    schema: Schema,
    expression: str,
    *,
    output: list[str],
    level: Mapping[str, Any] = STRONG,
    filter: str = "",
) -> list[dict[str, Any]]:
    # Without a limit a server loses records if keys are duplicated. count(*) may not have one.
    limit = None if output == ["count(*)"] else WINDOW
    call = functools.partial(query, schema=schema, expression=expression, output=output, level=level, limit=limit)
    # Patient, because a long reading that fails would begin again at its first page.
    return session.run(schema.collection, call, filter=filter, quoted=expression, patient=level is not BOUNDED, gated=True)
