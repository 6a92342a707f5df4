"""The nearest records of a query."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rmvdb.canonical.vectors import queries_of
from rmvdb.engines import filters
from rmvdb.engines.milvus.describing import schema_of
from rmvdb.engines.milvus.driver import ONCE
from rmvdb.engines.milvus.rows import MESSAGE, WINDOW, hits_of, output_of
from rmvdb.engines.milvus.session import Session, consistency
from rmvdb.errors import FilterError, Mismatch
from rmvdb.types import Hit, Moment, Vectors

#: The most hits of one call.
_HITS = 200_000
#: If duplicated keys may have cost hits: how many times more hits a search asks for, and how many at least.
_MORE, _MORE_AT_LEAST = 8, 1_000
#: Search parameters that must not be smaller than the number of hits of the search.
_AT_LEAST_LIMIT = ("ef", "search_list", "itopk_size", "reorder_k")

#: Lite 3 applies the filter and deletions only after it has looked at so many vectors or lists. So it must look at all of them.
_EVERYTHING: Mapping[str, object] = {"ef": 2**20, "nprobe": 65_536}


def search(
    session: Session,
    collection: str,
    vectors: Vectors,
    *,
    limit: int,
    filter: str | None = "",
    fields: Sequence[str] | None = (),
    search: Mapping[str, object] | None = None,
    strong: bool = False,
    after: Moment | None = None,
) -> list[list[Hit]]:
    """Return the nearest `limit` distinct records of each query (n, dim), nearest first. `fields=None` gives all fields."""
    schema = schema_of(session, collection)
    condition, queries = session.engine_filter(filter, schema), queries_of(schema, vectors)
    if not 0 < limit <= WINDOW:
        raise Mismatch(f"limit is {limit} (offset and rescore included); Milvus gives between 1 and {WINDOW} hits; ask for fewer")

    read = fields if fields is None else [*fields, *condition.fields]
    chosen = _EVERYTHING if session.engine().lite3 else search or {}

    def ask(rows: Vectors, most: int) -> list[_Answer]:
        found = session.run(
            collection,
            lambda client: client.search(
                collection,
                data=list(rows),
                anns_field=schema.vector_field,
                filter=condition.text,
                limit=most,
                output_fields=output_of(schema, read),
                search_params={"metric_type": schema.metric.value, "params": _search_params(chosen, most)},
                **consistency(strong=strong, after=after),
                **ONCE,
            ),
            filter=condition.text,
            gated=True,
        )
        return [_Answer(hits_of(schema, fields, hits, condition.test), len(hits.ids)) for hits in found]

    parts = _parts(queries, limit)
    most = session.most.get(collection, WINDOW)
    answers = [answer for part in parts for answer in _filled(part, limit, ask, most=most, loose=condition.test is not None)]
    if condition.test is not None:
        _complete(answers, limit, filter or "", session, most)
    return [answer.hits[:limit] for answer in answers]


def _parts(queries: Vectors, limit: int) -> list[Vectors]:
    """Split queries (n, dim) into calls that an engine takes: by their bytes, and by the hits of the answer."""
    size = max(1, min(_HITS // limit, WINDOW, MESSAGE // (4 * queries.shape[1])))
    return [queries[start : start + size] for start in range(0, len(queries), size)]


class _Answer(NamedTuple):
    hits: list[Hit]
    #: How many rows the engine gave: more than hits if a record came twice, or if the engine's filter is wider than the user's.
    rows: int


def _filled(
    queries: Vectors, limit: int, ask: Callable[[Vectors, int], list[_Answer]], *, most: int, loose: bool
) -> list[_Answer]:
    """Answer every query. Ask for more hits, up to `most`, if duplicated keys, or records that don't match, may have cost some.

    Every short list is checked. Under load Milvus 2.3.5 shows, once in hundreds of searches, every version that a record ever had
    (93 of each were counted). All rows of an answer then belong to a record or two.
    """
    answers, wanted = ask(queries, limit), limit
    short = [at for at, answer in enumerate(answers) if answer.rows and len(answer.hits) < limit]  # an empty answer hides nothing
    while short and wanted < most:
        wanted = min(max(_MORE * wanted, _MORE_AT_LEAST), most)
        size = max(1, _HITS // wanted)
        parts = [short[start : start + size] for start in range(0, len(short), size)]
        more = {at: answer for part in parts for at, answer in zip(part, ask(queries[part], wanted), strict=True)}
        grown = [
            at for at in short if (more[at].rows > answers[at].rows if loose else len(more[at].hits) > len(answers[at].hits))
        ]
        for at in grown:
            answers[at] = more[at]
        short = [at for at in grown if len(answers[at].hits) < limit]
    return answers


def _complete(answers: Sequence[_Answer], limit: int, filter: str, session: Session, most: int) -> None:
    """Raise FilterError if records beyond the `most` that an index gives may match."""
    if short := next((answer for answer in answers if answer.rows >= max(limit, most) and len(answer.hits) < limit), None):
        raise FilterError(
            f"The filter {filters.shown(filter)} cannot be answered: {session.version()} cannot express all of it, and of "
            f"the {short.rows:,} nearest records that it gave {len(short.hits)} match; ask for fewer than {limit}, or narrow it"
        )


def _search_params(search: Mapping[str, Any], wanted: int) -> dict[str, Any]:
    return {name: max(int(float(value)), wanted) if name in _AT_LEAST_LIMIT else value for name, value in search.items()}
