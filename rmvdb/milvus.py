"""VectorStore over pymilvus: a Milvus server or cluster from 2.3 on, or a Milvus Lite process; pymilvus' only importer.

What was measured on Milvus 2.3.5, Milvus Lite 2.5.1 and 3.2.2, and decides how things are done here:
a limited query gives the lowest keys on the first two (fewer than asked where keys are duplicated) and any keys on the third;
a server collapses duplicated keys only after it has cut at the limit; an upsert that names a key twice stores it twice;
Lite 2.5 puts ids into its own SQL unescaped and its search fails on an undeclared output field of an empty collection.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import tenacity

from rmvdb.errors import (
    AlreadyExists,
    CannotAdopt,
    CollectionMissing,
    EngineError,
    EngineUnavailable,
    FilterError,
    Mismatch,
    RmvdbError,
    offer,
)
from rmvdb.filters import INT64_BOUNDS, between, both, checked_id, closed, ids_in, without_not
from rmvdb.protocols import Permit, always
from rmvdb.types import Field, Hit, Id, IdType, Index, Metric, Record, Schema, Vectors

if TYPE_CHECKING:
    from pymilvus import MilvusClient

_T = TypeVar("_T")

#: The most rows of one query and hits of one search: Milvus' quotaAndLimits.limits.maxQueryResultWindow and topK.
WINDOW = 16_384
#: Bytes of one request or answer. Milvus 2.3 takes 64 MiB; Lite 2.5 sends 14 MB in half a second, 28 MB in 14.
_MESSAGE = 8 * 2**20
#: The most rows, ids and hits of one call, and the rows of the first one, when it is not known what they weigh.
_ROWS, _IDS, _HITS, _FEW = 1_000, 5_000, 200_000, 100
#: Seconds of one attempt to connect. pymilvus also spends them on the old address before it gives a broken connection up.
_CONNECT = 2.0
#: How much more is asked for where duplicated keys may have cost hits, and how many hits at least.
_MORE, _MORE_AT_LEAST = 8, 1_000
#: Search parameters that must not be smaller than the number of hits asked for.
_AT_LEAST_LIMIT = ("ef", "search_list", "itopk_size", "reorder_k")
#: How often a call that got no answer is sent again.
_SILENCES = 1
#: Rows after which Lite 3 is told to flush: searching 100,000 unflushed ones took it twice as long.
_FLUSH_AFTER = 10_000

#: What the description of an index says besides its parameters.
_NO_PARAMETERS = {"index_type", "metric_type", "dim", "field_name", "index_name", "state"}
_NO_PARAMETERS |= {"total_rows", "indexed_rows", "pending_index_rows"}

_MISSING, _NOT_LOADED = 100, 101
#: Milvus' own codes for "not now": unavailable, busy, rate limit, (not) recovering, no replica, channel, segment or node.
_PASSING = {2, 4, 8, 103, 106, 401, 500, 501, 503, 601, 602, 901, 902, 903, 904}
#: pymilvus' codes for a channel that is closed and for one that it could not repair.
_BROKEN = {1, 2}
_PASSING_TEXT = re.compile(
    r"no available shard|channel .*not available|not (ready|healthy|serviceable)|recovering|node .*(offline|not match|not found)"
    r"|closed channel|delegator not found"
    r"|has not been init"  # Milvus Lite answers a moment before it has started
)
_FILTER_TEXT = re.compile(r"expr|predicate|parse|column \d+|PhyFilterBits|Cannot find field", re.IGNORECASE)


class _Engine(NamedTuple):
    name: str
    version: str

    @property
    def lite2(self) -> bool:
        return self.name == "milvus-lite" and self.version.startswith("2")

    @property
    def lite3(self) -> bool:
        return self.name == "milvus-lite" and not self.lite2

    @property
    def partition_keys(self) -> bool:
        """Whether a partition key can be written and filtered by.

        Lite 2.5 takes one and cannot read a filter any more; an upsert of Milvus 2.3.5 puts records into partitions where a
        filter by the key does not find them (milvus pull request 30772).
        """
        numbers = [int(number) for number in re.findall(r"\d+", self.version)[:2]]
        return not self.lite2 and (self.name != "milvus" or numbers >= [2, 4])


class Gate(Protocol):
    """Keeps searches away while a record is replaced; for an engine that does not do so itself (`lite.gate`)."""

    def __call__(self, *, alone: bool) -> AbstractContextManager[None]:
        """Enter with others, or alone."""
        ...


def _open_gate(*, alone: bool) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


class MilvusStore:
    """A vector store that any number of threads share; it connects when it is first used and reconnects by itself.

    `address` is asked again at each connection, because a Milvus Lite process may have moved. A call that finds the engine
    unavailable is repeated for `patience` seconds; one that gets no answer for `timeout` seconds is sent once more, a write with
    a permit as often as that allows.
    """

    def __init__(
        self,
        address: Callable[[], str],
        token: str = "",
        *,
        timeout: float = 60.0,
        patience: float = 20.0,
        staleness: float | None = None,
        gate: Gate = _open_gate,
    ) -> None:
        self._connection = _Connection(address, token, timeout)
        self._timeout = timeout
        self._patience = patience
        self._staleness = staleness
        self._gate = gate
        self._schemas: dict[str, Schema] = {}
        self._unflushed: dict[str, int] = {}
        self._weights: dict[tuple[str, ...], int] = {}

    @property
    def staleness(self) -> float:
        """Seconds within which the engine shows every write to every search: none for Milvus Lite, 5 (gracefulTime) else."""
        if self._staleness is not None:
            return self._staleness
        return 0.0 if self._engine().name == "milvus-lite" else 5.0

    def version(self) -> str:
        """The engine and its version, such as "milvus 2.3.5"; raises EngineUnavailable if it does not answer."""
        return " ".join(self._engine(fresh=True))

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._connection.drop()

    # Collections

    def create(self, schema: Schema, index: Index) -> None:
        """Make the collection with its index, loaded; finishes one that was left half made, AlreadyExists for another schema."""
        name, engine = schema.collection, self._engine()
        made = not self.exists(name) and self._make(schema, engine)
        if not made:
            _same(schema, self._read(name))
        try:
            self._finish(schema, index)
        except RmvdbError:
            if made:
                self.drop(name)
            raise

    def _make(self, schema: Schema, engine: _Engine) -> bool:
        """Whether this call made it; False where another one was faster."""
        try:
            self._run(
                schema.collection,
                # For the other programs that will read it; every call of this class names its own level.
                lambda client: client.create_collection(
                    schema.collection, schema=_engine_schema(schema, engine), consistency_level="Bounded", **_ONCE
                ),
            )
        except EngineError:
            if not self.exists(schema.collection):
                raise
            return False
        return True

    def _finish(self, schema: Schema, index: Index) -> None:
        name, field = schema.collection, schema.vector_field

        def finish(client: MilvusClient) -> None:
            found = _vector_index(client, name, field)
            if not found:
                try:
                    client.create_index(name, index_params(schema, index), **_ONCE)
                except _foreign_errors():
                    if not (found := _vector_index(client, name, field)):  # nobody else was faster
                        raise
            if found and found.get("metric_type") != schema.metric.value:
                raise AlreadyExists(
                    f"Collection {name!r} exists with metric {found.get('metric_type')}; drop it or take its name"
                )
            client.load_collection(name, **_ONCE)

        self._run(name, finish)

    def describe(self, collection: str) -> Schema:
        """Read the schema (of the collection behind the name, where it is an alias); CannotAdopt for what cannot be served."""
        raw = self._read(collection)
        _adoptable(collection, raw, self._engine())
        partitions = self._partitions(collection, raw)
        name, vector = raw["collection_name"], _vector_fields(raw)[0]
        index = self._run(collection, lambda client: _vector_index(client, collection, vector["name"]))
        metric = index.get("metric_type", "")
        if partitions:
            _refuse(collection, f"has the partition {partitions[0]!r}", "copy it into a collection without partitions")
        if metric not in set(Metric):
            _refuse(collection, f"has no index with a metric on {vector['name']!r}", "create one, such as AUTOINDEX with COSINE")
        return _schema(name, raw, Metric(metric))

    def index(self, collection: str) -> Index:
        """The index on the vectors as it was built, as far as the engine tells; Lite 3 gives no parameters."""
        field = self._schema(collection).vector_field
        found = self._run(collection, lambda client: _vector_index(client, collection, field))
        return Index(type=found["index_type"], params={name: found[name] for name in found.keys() - _NO_PARAMETERS})

    def exists(self, collection: str) -> bool:
        """Whether there is a collection of that name."""
        return bool(self._run(collection, lambda client: client.has_collection(collection, **_ONCE)))

    def drop(self, collection: str) -> None:
        """Remove the collection and its records; does nothing where there is none."""
        self._schemas.pop(collection, None)
        if self.exists(collection):
            self._run(collection, lambda client: client.drop_collection(collection, **_ONCE))

    def move_aliases(self, collection: str, target: str) -> list[str]:
        """Let every other name of the collection stand for the target; tells them, none where the engine has no aliases."""
        found = sorted(self._read(collection).get("aliases", ())) if self.exists(collection) else []

        def move(client: MilvusClient) -> None:
            for alias in found:
                client.alter_alias(target, alias, **_ONCE)

        self._run(target, move)
        return found

    # Reading

    def search(
        self,
        collection: str,
        vectors: Vectors,
        *,
        limit: int,
        filter: str = "",
        fields: Sequence[str] | None = (),
        search: Mapping[str, object] | None = None,
        strong: bool = False,
    ) -> list[list[Hit]]:
        """The nearest `limit` distinct records of each query (n, dim), nearest first; `fields=None` gives all of them."""
        schema = self._schema(collection)
        filter, queries = self._readable(filter, schema), _queries(collection, schema, vectors)
        if not 0 < limit <= WINDOW:
            raise Mismatch(f"limit is {limit}; Milvus gives between 1 and {WINDOW} hits")

        def ask(rows: Vectors, asked: int) -> list[list[Hit]]:
            with self._gate(alone=False):
                found = self._run(
                    collection,
                    lambda client: client.search(
                        collection,
                        data=list(rows),
                        anns_field=schema.vector_field,
                        filter=filter,
                        limit=asked,
                        output_fields=_output(schema, fields),
                        search_params={"metric_type": schema.metric.value, "params": _search_params(search, asked)},
                        consistency_level=_level(strong),
                        **_ONCE,
                    ),
                    filter=filter,
                )
            return [_hits(schema, fields, hits) for hits in found]

        size = max(1, _HITS // limit)
        parts = [queries[start : start + size] for start in range(0, len(queries), size)]
        return [hits[:limit] for part in parts for hits in _filled(part, limit, ask)]

    def get(
        self,
        collection: str,
        ids: Sequence[Id],
        *,
        fields: Sequence[str] | None = None,
        vector: bool = False,
        strong: bool = True,
    ) -> list[Record]:
        """The records of these ids that exist, each once, in the order asked; `fields=None` gives all of them."""
        schema = self._schema(collection)
        wanted = list(dict.fromkeys(checked_id(id, schema) for id in ids))
        output = [*_output(schema, fields), *([schema.vector_field] if vector else [])]
        kind = (collection, *output)
        found: dict[Id, Record] = {}
        start = 0
        while start < len(wanted):
            part = wanted[start : start + self._rows_at_once(schema, kind)]
            rows = self._query(schema, ids_in(schema.id_field, part), output=output, strong=strong)
            found |= {row[schema.id_field]: _record(schema, fields, row) for row in rows}
            if rows:
                self._weights[kind] = max(1, sum(_weight(schema, row) for row in rows) // len(rows))
            start += len(part)
        return [found[id] for id in wanted if id in found]

    def _rows_at_once(self, schema: Schema, kind: tuple[str, ...]) -> int:
        """How many rows of these fields fit into one answer, from what the last ones weighed; a few where none was seen."""
        if kind[1:] == (schema.id_field,):
            return _ROWS
        weight = self._weights.get(kind, _MESSAGE // _FEW)
        return max(1, min(_ROWS, _MESSAGE // weight))

    def scan(
        self,
        collection: str,
        *,
        filter: str = "",
        fields: Sequence[str] | None = (),
        vector: bool = False,
        after: Id | None = None,
        upto: Id | None = None,
        page: int = 1000,
    ) -> Iterator[list[Record]]:
        """Every record in ascending id order, each once, in pages, with `after < id <= upto`; strong; bounded by the page.

        Up to 16,384 ids are read ahead, a range of them at a time that is proven whole; their records come page by page.
        """
        schema = self._schema(collection)
        bare = not vector and fields is not None and not fields
        for window in self._windows(schema, self._readable(filter, schema), after, upto):
            for start in range(0, len(window.ids), page):
                ids = window.ids[start : start + page]
                records = [Record(id=id) for id in ids] if bare else self.get(collection, ids, fields=fields, vector=vector)
                if records:
                    yield records

    def count(self, collection: str, *, filter: str = "") -> int:
        """How many distinct ids match, at strong consistency.

        Exact up to 16,384 ids. Above, `count(*)` is believed if the first 16,384 ids stand for as many rows; else, since the
        collection has duplicated keys, every id is read.
        """
        schema = self._schema(collection)
        filter = self._readable(filter, schema)
        windows = self._windows(schema, filter, None, None)
        first = next(windows, _NOTHING)
        if first.last:
            return len(first.ids)
        if first.rows == len(first.ids):
            return self._rows(schema, filter, None, None)
        return len(first.ids) + sum(len(window.ids) for window in windows)

    def _readable(self, filter: str, schema: Schema) -> str:
        """The filter in words that this engine knows."""
        return without_not(closed(filter), schema) if self._engine().lite2 else closed(filter)

    def _windows(self, schema: Schema, filter: str, after: Id | None, upto: Id | None) -> Iterator[_Window]:
        """Whole ranges of ids, ascending.

        No engine promises which rows a limited query gives, so what it gave is believed once `count(*)` of the range it
        spans agrees; else a range that is small enough to be given whole is looked for.
        """
        while True:
            window = self._window(schema, filter, after, upto)
            if window.ids:
                yield window
                after = window.ids[-1]
            if window.last:
                return

    def _window(self, schema: Schema, filter: str, after: Id | None, upto: Id | None) -> _Window:
        ids = self._ids(schema, filter, after, upto)
        if len(ids) < WINDOW:
            rows = self._rows(schema, filter, after, upto) if ids else 0
            if rows <= WINDOW:
                return _Window(ids, rows, last=True)
        while True:
            end = ids[-1]
            rows = self._rows(schema, filter, after, end)
            if rows <= len(ids) or len(ids) == 1:
                return _Window(ids, rows, last=False)
            if rows <= WINDOW:
                return _Window(self._ids(schema, filter, after, end), rows, last=False)
            # Aim at four fifths of a window: the ids at hand are a sample of those in the range.
            end = ids[min(len(ids) - 2, len(ids) * WINDOW * 4 // (rows * 5))]
            ids = self._ids(schema, filter, after, end) or ids[:1]

    def _ids(self, schema: Schema, filter: str, after: Id | None, upto: Id | None) -> list[Id]:
        within = between(schema.id_field, after, upto) or _every(schema)
        rows = self._query(schema, both(filter, within), output=[schema.id_field], filter=filter)
        return sorted({row[schema.id_field] for row in rows})

    def _rows(self, schema: Schema, filter: str, after: Id | None, upto: Id | None) -> int:
        within = between(schema.id_field, after, upto)
        rows = self._query(schema, both(filter, within), output=["count(*)"], filter=filter)
        return int(rows[0]["count(*)"]) if rows else 0

    def _query(
        self,
        schema: Schema,
        expression: str,
        *,
        output: list[str],
        strong: bool = True,
        filter: str = "",
    ) -> list[dict[str, Any]]:
        # Without a limit a server loses records where keys are duplicated; for count(*) it may not be given.
        limit = {} if output == ["count(*)"] else {"limit": WINDOW}
        call = functools.partial(
            _ask, collection=schema.collection, expression=expression, output=output, level=_level(strong), limit=limit
        )
        with self._gate(alone=False):
            return self._run(schema.collection, call, filter=filter)

    # Writing

    def upsert(self, collection: str, records: Sequence[Record], *, permit: Permit = always) -> None:
        """Write records (vectors required), replacing those of the same id; returns when all are written."""
        schema = self._schema(collection)
        # A key that stands twice in one call would be stored twice: the last one counts.
        rows = {row[schema.id_field]: row for row in (_row(schema, record) for record in records)}
        self._check_ids(rows)
        for part in _parts(list(rows.values()), schema):
            write = functools.partial(_write, collection=collection, rows=part, whole=self._engine().lite3)
            with self._gate(alone=True):
                self._run(collection, write, permit=permit)
        self._written(collection, len(rows))

    def delete(self, collection: str, ids: Sequence[Id], *, permit: Permit = always) -> None:
        """Remove the records of these ids; ids that are not there are no error."""
        schema = self._schema(collection)
        wanted = list(dict.fromkeys(checked_id(id, schema) for id in ids))
        self._check_ids(wanted)
        for start in range(0, len(wanted), _IDS):
            expression = ids_in(schema.id_field, wanted[start : start + _IDS])
            self._run(collection, functools.partial(_remove, collection=collection, expression=expression), permit=permit)
        self._written(collection, len(wanted))

    def _check_ids(self, ids: Any) -> None:
        """Lite 2.5 deletes, and so upserts, with SQL that it writes itself: a quote in an id would be read as SQL."""
        if self._engine().lite2 and (bad := next((id for id in ids if isinstance(id, str) and set(id) & set("'\0\n\r")), None)):
            raise EngineError(
                f"Milvus Lite 2.5 cannot write or delete the id {bad!r}: quotes, line breaks and NUL break its SQL; "
                "use a Milvus server or rename the id"
            )

    def _written(self, collection: str, rows: int) -> None:
        if not rows or not self._engine().lite3:
            return
        self._unflushed[collection] = self._unflushed.get(collection, 0) + rows
        if self._unflushed[collection] >= _FLUSH_AFTER:
            self._unflushed[collection] = 0
            self._run(collection, lambda client: client.flush(collection, **_ONCE))

    # Talking to the engine

    def _engine(self, *, fresh: bool = False) -> _Engine:
        return self._run("", lambda client: self._connection.engine(client, fresh=fresh))

    def _read(self, collection: str) -> dict[str, Any]:
        return dict(self._run(collection, lambda client: client.describe_collection(collection, **_ONCE)))

    def _partitions(self, collection: str, raw: Mapping[str, Any]) -> list[str]:
        """Partitions that somebody made; those of a partition key are the engine's own."""
        if self._engine().lite2 or any(field.get("is_partition_key") for field in raw["fields"]):
            return []
        names = self._run(collection, lambda client: client.list_partitions(collection, **_ONCE))
        return [name for name in names if name != "_default"]

    def _schema(self, collection: str) -> Schema:
        known = self._schemas.get(collection)
        if known is None:
            known = self._schemas[collection] = self.describe(collection)
        return known

    def _run(self, collection: str, call: Callable[[MilvusClient], _T], *, filter: str = "", permit: Permit = always) -> _T:
        """Run one call, again while the engine is unavailable and `permit` allows it, and translate what it raises."""
        foreign, silences = _foreign_errors(), itertools.count()

        def attempt() -> _T:
            client = None
            try:
                client = self._connection.get()
                permit()
                return call(client)
            except foreign as exc:
                loading = client and _code(exc) == _NOT_LOADED and _loading(client, collection)
                # Repeated, no call changes anything more. A server that recovers may swallow the first one.
                silent = _status(exc) == "DEADLINE_EXCEEDED" and (permit is not always or next(silences) < _SILENCES)
                if not (_passing(exc) or loading or silent):
                    raise
                if client and (_status(exc) or _code(exc) in _BROKEN):
                    self._connection.drop(client)
                raise _NotNowError from exc

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_delay(self._patience),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=2.0),
            retry=tenacity.retry_if_exception_type(_NotNowError),
            reraise=True,
        )
        try:
            return retrying(attempt)
        except _NotNowError as exc:
            text = _text(exc.__cause__ or exc)
            way_out = "see that it runs and that the address is right"
            raise EngineUnavailable(
                f"Milvus at {self._connection.place} cannot be reached ({text}); {way_out}"
            ) from exc.__cause__
        except foreign as exc:
            if _code(exc) == _MISSING:
                self._schemas.pop(collection, None)
            raise self._translated(exc, collection, filter) from exc

    def _translated(self, exc: BaseException, collection: str, filter: str) -> RmvdbError:
        place, text = self._connection.place, _text(exc)
        if _status(exc) == "DEADLINE_EXCEEDED":
            return EngineUnavailable(f"Milvus at {place} gave no answer within {self._timeout:g} s; look at its load and its log")
        if _status(exc) in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            return EngineError(f"Milvus at {place} refused the token ({text}); correct it")
        if _code(exc) == _MISSING:
            return CollectionMissing(f"There is no collection {collection!r} at {place}{self._others(collection)}")
        if _code(exc) == _NOT_LOADED:
            way_out = f"load it with MilvusClient({place!r}).load_collection({collection!r})"
            return EngineError(f"Collection {collection!r} is not loaded, so that it cannot be searched; {way_out}")
        if filter and _FILTER_TEXT.search(text):
            return FilterError(f"The filter {filter!r} is not understood by Milvus: {text}")
        return EngineError(f"Milvus at {place} refused a call on {collection!r}: {text}")

    def _others(self, collection: str) -> str:
        """What there is instead, where this program may ask."""
        with contextlib.suppress(*_foreign_errors()):
            return f"; {offer(collection, self._connection.get().list_collections(**_ONCE))}"
        return ""


class _Connection:
    """The one client of a store, opened when it is needed and opened anew after a failure."""

    def __init__(self, address: Callable[[], str], token: str, timeout: float) -> None:
        self._address = address
        self._token = token
        self._timeout = timeout
        self._lock = threading.Lock()
        self._client: MilvusClient | None = None
        self._engine: _Engine | None = None
        #: Where the last client was sent.
        self.place = "its address"

    def get(self) -> MilvusClient:
        client = self._client
        if client is not None:
            return client
        with self._lock:
            if self._client is None:
                self.place = self._address()
                self._client = _open(self.place, self._token, self._timeout)
                self._engine = None
            return self._client

    def drop(self, client: MilvusClient | None = None) -> None:
        """Close the client; nothing where another thread has already done so with this one."""
        with self._lock:
            if self._client is None or client not in (None, self._client):
                return
            old, self._client = self._client, None
        old.close()

    def engine(self, client: MilvusClient, *, fresh: bool) -> _Engine:
        if self._engine is None or fresh:
            self._engine = _ask_engine(client)
        return self._engine


#: pymilvus repeats a failed call 75 times by default, in minutes; repeating is done here, where the address is asked again.
_ONCE: dict[str, Any] = {"retry_times": 0}


def _open(place: str, token: str, timeout: float) -> MilvusClient:
    # A deadline for every call of the channel: pymilvus' own timeout would also make it repeat failures that long.
    deadline = json.dumps({"methodConfig": [{"name": [{}], "timeout": f"{timeout:.3f}s"}]})
    options: dict[str, Any] = {"grpc.service_config": deadline}
    if place.startswith("unix:"):
        # pymilvus pings every 10 s. A Milvus server allows that; Milvus Lite ends the connection ("too_many_pings") after a
        # minute and a half without a call, and no firewall forgets a socket of this machine.
        options["grpc.keepalive_time_ms"] = 2**31 - 1
    opened: MilvusClient = _pymilvus().MilvusClient(
        uri=place, token=token, timeout=min(timeout, _CONNECT), dedicated=True, grpc_options=options
    )
    return opened


@functools.cache
def _pymilvus() -> Any:
    import pymilvus

    # It logs a traceback for each failed call, also for those that are repeated or expected here.
    for name in ("pymilvus", "pymilvus.milvus_client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return pymilvus


@functools.cache
def _foreign_errors() -> tuple[type[BaseException], ...]:
    import grpc  # type: ignore[import-untyped]

    return (_pymilvus().MilvusException, grpc.RpcError)


def _ask_engine(client: MilvusClient) -> _Engine:
    try:
        found = str(client.get_server_version(**_ONCE))
    except _foreign_errors() as exc:
        if _status(exc) != "UNIMPLEMENTED":
            raise
        # Only Lite 2 cannot say; the process serves the package that is installed beside this one.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version("milvus-lite")
            return _Engine("milvus-lite", version if version.startswith("2.") else "2")
        return _Engine("milvus-lite", "2")
    name = "milvus-lite" if "milvus_lite" in found else "milvus"
    number = re.search(r"\d[\w.]*", found.replace("milvus_lite", ""))
    return _Engine(name, number[0] if number else found)


class _NotNowError(Exception):
    """The engine may answer if it is asked again; the cause says why it did not."""


def _passing(exc: BaseException) -> bool:
    if _status(exc) in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return False
    return _status(exc) in ("UNAVAILABLE", "CANCELLED") or _code(exc) in _PASSING or bool(_PASSING_TEXT.search(_text(exc)))


def _loading(client: MilvusClient, collection: str) -> bool:
    """Whether a server is still loading the collection, as after its restart, rather than keeping it released."""
    try:
        state = client.get_load_state(collection, **_ONCE)["state"]
    except _foreign_errors():
        return False
    return bool(state.name in ("Loading", "Loaded"))


def _status(exc: BaseException) -> str:
    """The name of the gRPC status, "" for an error of Milvus itself; a failure to connect hides it in its cause."""
    code = getattr(exc, "code", None)
    name = getattr(code() if callable(code) else code, "name", "")
    cause = exc.__cause__
    return name if name or cause is None or cause is exc else _status(cause)


def _code(exc: BaseException) -> int:
    code = getattr(exc, "code", None)
    return code if isinstance(code, int) and not _status(exc) else 0


def _text(exc: BaseException) -> str:
    details = getattr(exc, "details", None)
    text = str(getattr(exc, "message", "") or (details() if callable(details) else "") or exc)
    return " ".join(re.sub(r"^\[\w+\] Retry run out of \d+ retry times, (message=)?", "", text).split())[:300]


# Schemas


def index_params(schema: Schema, index: Index) -> Any:
    """The index in pymilvus' own form: exactly the parameters of `index`."""
    params = _pymilvus().MilvusClient.prepare_index_params()
    params.add_index(
        field_name=schema.vector_field,
        index_name=schema.vector_field,
        index_type=index.type,
        metric_type=schema.metric.value,
        # pymilvus would send True; Milvus 2.4 takes "true" and "false" only.
        params={name: str(value).lower() if isinstance(value, bool) else value for name, value in index.params.items()},
    )
    return params


def _engine_schema(schema: Schema, engine: _Engine) -> Any:
    types = _pymilvus().DataType
    made = _pymilvus().MilvusClient.create_schema(auto_id=False, enable_dynamic_field=schema.dynamic)
    length = {"max_length": schema.id_max_length} if schema.id_type is IdType.VARCHAR else {}
    made.add_field(schema.id_field, types[schema.id_type.value], is_primary=True, **length)
    made.add_field(schema.vector_field, types.FLOAT_VECTOR, dim=schema.dim)
    for field in schema.fields:
        params = dict(field.params)
        if not engine.partition_keys:
            params.pop("is_partition_key", None)
        if "element_type" in params:
            params["element_type"] = types[params["element_type"]]
        made.add_field(field.name, types[field.type], **params)
    return made


def _same(schema: Schema, raw: Mapping[str, Any]) -> None:
    """AlreadyExists where the collection is not what the schema says; lengths and such differ between engines."""
    found = {field["name"]: (field["type"].name, _dim(field)) for field in raw["fields"]}
    wanted: dict[str, tuple[str, int]] = {field.name: (field.type, 0) for field in schema.fields}
    wanted |= {schema.id_field: (schema.id_type.value, 0), schema.vector_field: ("FLOAT_VECTOR", schema.dim)}
    if found != wanted or bool(raw.get("enable_dynamic_field")) != schema.dynamic:
        raise AlreadyExists(f"Collection {schema.collection!r} exists with another schema; drop it or take another name")


def _dim(field: Mapping[str, Any]) -> int:
    return int(field.get("params", {}).get("dim", 0))


def _vector_fields(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [field for field in raw["fields"] if "VECTOR" in field["type"].name]


def _refuse(collection: str, what: str, way_out: str) -> None:
    raise CannotAdopt(f"Collection {collection!r} {what}, which rmvdb cannot serve; {way_out}")


def _adoptable(collection: str, raw: Mapping[str, Any], engine: _Engine) -> None:
    vectors = _vector_fields(raw)
    kinds = ", ".join(field["type"].name for field in vectors)
    copy = "copy it into a collection with ids of your own"
    if raw.get("auto_id") or any(field.get("auto_id") for field in raw["fields"]):
        _refuse(collection, "makes its ids itself (auto_id)", copy)
    if raw.get("functions"):
        _refuse(collection, f"computes fields by the function {raw['functions'][0].get('name')!r}", "copy it without functions")
    if len(vectors) != 1:
        _refuse(collection, f"has {len(vectors)} vector fields ({kinds})", "copy it into a collection with one vector field")
    if vectors[0]["type"].name != "FLOAT_VECTOR":
        _refuse(collection, f"has vectors of type {kinds}", "copy it into a collection of FLOAT_VECTOR")
    if vectors[0].get("nullable"):
        _refuse(collection, "may hold records without a vector", "copy it into a collection whose vector is not nullable")
    if nested := next((field for field in raw["fields"] if "STRUCT" in field["type"].name), None):
        _refuse(collection, f"has the field {nested['name']!r} of structs", "copy it with fields of their own")
    if not engine.partition_keys and any(field.get("is_partition_key") for field in raw["fields"]):
        _refuse(collection, f"has a partition key, in which {' '.join(engine)} loses records", "use Milvus 2.4 or newer")
    if _seconds(raw.get("properties", {}).get("collection.ttl.seconds")) > 0:
        _refuse(collection, "forgets records by itself (collection.ttl.seconds)", "drop that property")


def _seconds(value: Any) -> float:
    return float(value) if value else 0.0


def _vector_index(client: MilvusClient, collection: str, field: str) -> dict[str, Any]:
    """The description of the index on the vector field, empty without one."""
    for name in client.list_indexes(collection, **_ONCE):
        found = client.describe_index(collection, name, **_ONCE) or {}
        if found.get("field_name") == field:
            return dict(found)
    return {}


def _schema(name: str, raw: Mapping[str, Any], metric: Metric) -> Schema:
    vector = _vector_fields(raw)[0]
    primary = next(field for field in raw["fields"] if field.get("is_primary"))
    return Schema(
        collection=name,
        dim=_dim(vector),
        metric=metric,
        id_type=IdType(primary["type"].name),
        id_field=primary["name"],
        id_max_length=int(primary.get("params", {}).get("max_length", 512)),
        vector_field=vector["name"],
        fields=tuple(_field(field) for field in raw["fields"] if field is not primary and field is not vector),
        dynamic=bool(raw.get("enable_dynamic_field")),
    )


def _field(raw: Mapping[str, Any]) -> Field:
    params = dict(raw.get("params", {}))
    if raw["type"].name == "ARRAY":
        params["element_type"] = raw["element_type"].name
    params |= {key: True for key in ("nullable", "is_partition_key", "is_clustering_key") if raw.get(key)}
    if (default := _default(raw.get("default_value"))) is not None:
        params["default_value"] = default
    return Field(name=raw["name"], type=raw["type"].name, params=params)


def _default(value: Any) -> Any:
    """The value inside Milvus' message, which names its type."""
    kind = value.WhichOneof("data") if hasattr(value, "WhichOneof") else None
    return getattr(value, kind) if kind else None if hasattr(value, "WhichOneof") else value


# Rows, records and hits


class _Window(NamedTuple):
    #: Every id of a range, ascending.
    ids: list[Id]
    #: How many rows they stand for.
    rows: int
    #: Whether no id follows.
    last: bool


_NOTHING = _Window([], 0, last=True)


def _filled(queries: Vectors, limit: int, ask: Callable[[Vectors, int], list[list[Hit]]]) -> list[list[Hit]]:
    """Hits of every query, asked for more where duplicated keys may have cost some of them.

    No short list is believed untried. Under load Milvus 2.3.5 shows, once in hundreds of searches, every version that a record
    ever had (93 of each were counted): as many rows as were asked for are then those of a record or two.
    """
    found, asked = ask(queries, limit), limit
    short = [at for at, hits in enumerate(found) if 0 < len(hits) < limit]  # where there is nothing, nothing is hidden
    while short and asked < WINDOW:
        asked = min(max(_MORE * asked, _MORE_AT_LEAST), WINDOW)
        more = dict(zip(short, ask(queries[short], asked), strict=True))
        grown = [at for at in short if len(more[at]) > len(found[at])]
        for at in grown:
            found[at] = more[at]
        short = [at for at in grown if len(found[at]) < limit]
    return found


def _level(strong: bool) -> str:
    return "Strong" if strong else "Bounded"


def _search_params(search: Mapping[str, Any] | None, asked: int) -> dict[str, Any]:
    return {name: max(int(value), asked) if name in _AT_LEAST_LIMIT else value for name, value in (search or {}).items()}


def _every(schema: Schema) -> str:
    """An expression that holds for every id: a query must have one."""
    return f'{schema.id_field} >= ""' if schema.id_type is IdType.VARCHAR else f"{schema.id_field} >= {INT64_BOUNDS[0] + 1}"


def _queries(collection: str, schema: Schema, vectors: Vectors) -> Vectors:
    queries = np.ascontiguousarray(vectors, dtype=np.float32)  # (n, dim)
    if queries.ndim != 2 or queries.shape[1] != schema.dim:
        raise Mismatch(f"Collection {collection!r} has vectors of dimension {schema.dim}; the queries have shape {queries.shape}")
    return queries


def _row(schema: Schema, record: Record) -> dict[str, Any]:
    id = checked_id(record.id, schema)
    vector = np.asarray(record.vector if record.vector is not None else [], dtype=np.float32)
    if vector.shape != (schema.dim,) or not math.isfinite(float(vector.sum())):
        problem = f"shape {vector.shape}" if vector.shape != (schema.dim,) else "values that are not finite"
        raise Mismatch(f"Record {id!r} has a vector with {problem}; {schema.collection!r} takes {schema.dim} finite numbers")
    return {**record.fields, schema.id_field: id, schema.vector_field: vector}


def _ask(
    client: MilvusClient, *, collection: str, expression: str, output: list[str], level: str, limit: dict[str, int]
) -> list[dict[str, Any]]:
    found = client.query(collection, filter=expression, output_fields=output, consistency_level=level, **limit, **_ONCE)
    return list(found)


def _write(client: MilvusClient, *, collection: str, rows: list[dict[str, Any]], whole: bool) -> None:
    # Lite 3 keeps the undeclared fields of the old record in an upsert; its insert replaces a record of that id whole.
    (client.insert if whole else client.upsert)(collection, rows, **_ONCE)


def _remove(client: MilvusClient, *, collection: str, expression: str) -> None:
    client.delete(collection, filter=expression, **_ONCE)


def _parts(rows: list[dict[str, Any]], schema: Schema) -> Iterator[list[dict[str, Any]]]:
    """Rows in requests that stay under gRPC's limit."""
    part: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        weight = _weight(schema, row)
        if part and (size + weight > _MESSAGE or len(part) >= _IDS):
            yield part
            part, size = [], 0
        part.append(row)
        size += weight
    if part:
        yield part


def _weight(schema: Schema, row: Mapping[str, Any]) -> int:
    """About how many bytes a row is on the wire."""
    fields = sum(len(repr(value)) for name, value in row.items() if name != schema.vector_field)
    return fields + 4 * schema.dim * (schema.vector_field in row)


def _output(schema: Schema, fields: Sequence[str] | None) -> list[str]:
    """Declared fields by name and the undeclared ones as a whole: only that works on every engine, empty collections too."""
    declared = [field.name for field in schema.fields]
    if fields is None:
        return [schema.id_field, *declared, *(["$meta"] if schema.dynamic else [])]
    unknown = [name for name in fields if name not in declared and name not in (schema.id_field, schema.vector_field)]
    if unknown and not schema.dynamic:
        raise Mismatch(f"Collection {schema.collection!r} has no field {unknown[0]!r}; it has {', '.join(declared) or 'none'}")
    return [schema.id_field, *(name for name in declared if name in fields), *(["$meta"] if unknown else [])]


def _fields(schema: Schema, fields: Sequence[str] | None, row: Mapping[str, Any]) -> dict[str, Any]:
    keys = row.keys() if fields is None else fields
    hidden = (schema.id_field, schema.vector_field, "$meta")
    return {key: _plain(row[key]) for key in keys if key in row and key not in hidden}


def _plain(value: Any) -> Any:
    """An ARRAY arrives as a message's own sequence."""
    return value if value is None or isinstance(value, str | int | float | dict | list) else list(value)


def _record(schema: Schema, fields: Sequence[str] | None, row: Mapping[str, Any]) -> Record:
    vector = row.get(schema.vector_field)
    array = None if vector is None else np.asarray(vector, dtype=np.float32)
    return Record(id=row[schema.id_field], vector=array, fields=_fields(schema, fields, row))


def _hits(schema: Schema, fields: Sequence[str] | None, found: Any) -> list[Hit]:
    """Hits with each id once, its nearest one."""
    hits: dict[Id, Hit] = {}
    for id, score, hit in zip(found.ids, found.distances, found, strict=True):
        if id not in hits:
            distance = _distance(schema.metric, score)
            entity = _fields(schema, fields, hit["entity"])
            hits[id] = Hit(id=id, distance=distance, fields=entity, leg=schema.collection, raw=distance)
    return list(hits.values())


def _distance(metric: Metric, score: float) -> float:
    """Smaller is closer: Milvus gives the cosine, the inner product or the squared Euclidean distance."""
    if metric is Metric.COSINE:
        return 1.0 - score
    return -score if metric is Metric.IP else score
