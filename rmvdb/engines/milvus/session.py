"""Calls to an engine: repeated while it is unavailable, their errors translated into rmvdb's."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from rmvdb import timing
from rmvdb.engines import filters
from rmvdb.engines.milvus.connection import Connection, Engine
from rmvdb.engines.milvus.driver import ONCE, foreign_errors, timestamp
from rmvdb.engines.milvus.failures import (
    MISSING,
    NOT_LOADED,
    TRANSIENT,
    Failure,
    Step,
    broken,
    classify,
    code_of,
    is_loading,
    lacks_database,
    next_step,
    status_of,
    text_of,
)
from rmvdb.errors import CollectionMissing, EngineError, EngineKilled, EngineUnavailable, Refused, RmvdbError, offer
from rmvdb.protocols import Permit, always
from rmvdb.text import counted
from rmvdb.types import MARK_PREFIX, Moment, Schema

if TYPE_CHECKING:
    from rmvdb.engines.milvus.driver import MilvusClient

_log = logging.getLogger(__name__)
#: An application may have seeded the shared generator, and forked children share the state of any other.
_random = random.SystemRandom()
_T = TypeVar("_T")

#: How often the connection may break under one call.
_CUTS = 2
#: The most seconds between two attempts of a call, and the most if the connection broke under the first.
_PAUSE, _APART = 2.0, 1.0


class Gate(Protocol):
    """Keeps searches away while a record is replaced, for an engine that does not do so itself (`lite.gate`)."""

    def __call__(self, *, alone: bool) -> AbstractContextManager[None]:
        """Enter with others, or alone."""
        ...


def _open_gate(*, alone: bool) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


#: Two consistency levels, as pymilvus takes them.
STRONG: Mapping[str, Any] = {"consistency_level": "Strong"}
BOUNDED: Mapping[str, Any] = {"consistency_level": "Bounded"}


def consistency(*, strong: bool, after: Moment | None = None) -> Mapping[str, Any]:
    """Return the consistency level of a call.

    Strong waits for the next tick of the engine's clock (0.2 s) at every call. A moment is waited for once: when a tick has
    passed it, calls after it wait for nothing. Milvus' own level "Session" knows no moment of a deletion.
    """
    if strong or after == 0:
        return STRONG
    return {"consistency_level": "Customized", "guarantee_timestamp": after} if after else BOUNDED


class _Request(NamedTuple, Generic[_T]):
    """One call, as `Session.run` was given it."""

    collection: str
    call: Callable[[MilvusClient], _T]
    filter: str
    quoted: str
    permit: Permit
    patient: bool
    gated: bool
    cuts: int


class Session:
    """A store's knowledge of its engine, and its calls to it. The verbs of `MilvusStore` are functions of a session."""

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
        self._connection = Connection(address, token, timeout)
        #: For a patient call that got no answer.
        self._slow = Connection(address, token, max(timeout, patience))
        self._patience = patience
        self._staleness = staleness
        self._gate, self._inside = gate, threading.local()
        #: The schema of each collection, until it is described again or the engine says that it does not exist.
        self.schemas: dict[str, Schema] = {}
        #: The most hits that a search of a collection may ask for, by the type of its index.
        self.most: dict[str, int] = {}
        #: Rows written into each collection since its last flush.
        self.unflushed: dict[str, int] = {}
        #: The flushed segments of each collection, as this session last saw them before a flush.
        self.flushed: dict[str, set[int]] = {}
        #: The collections whose schema pymilvus has read, as address and name.
        self.introduced: set[tuple[str, str]] = set()
        #: The average bytes of the last rows read, by collection and fields.
        self.weights: dict[tuple[str, ...], int] = {}

    @property
    def staleness(self) -> float:
        """Seconds within which the engine shows every write to every search: 0 for Milvus Lite, else 5 (gracefulTime)."""
        if self._staleness is not None:
            return self._staleness
        return 0.0 if self.engine().name == "milvus-lite" else 5.0

    @property
    def settles_at_once(self) -> bool:
        """Whether every search finds every write without a flush. A server's filtered searches miss many."""
        return self.engine().name == "milvus-lite"

    def version(self) -> str:
        """Return the engine and its version, such as "milvus 2.3.5". Raises EngineUnavailable if it does not answer."""
        return " ".join(self.engine(fresh=True))

    def moment(self) -> Moment:
        """Return the server's time. Return 0 for Milvus Lite, which shows all writes, and if the server does not answer.

        It makes one attempt: the caller has written, and a strong call shows that write, too.
        """
        with contextlib.suppress(EngineError, *foreign_errors()):
            client = self._connection.get()
            if self._connection.engine(client, fresh=False).name != "milvus-lite":
                return timestamp(client)
        return 0

    def close(self) -> None:
        """Close the connections; the next call opens another."""
        self._connection.drop()
        self._slow.drop()

    def end(self, client: MilvusClient) -> None:
        """Close one client's connection under its call, which then fails as if the engine were away."""
        for connection in (self._connection, self._slow):
            connection.drop(client)

    def place(self) -> str:
        """Return the address of the last call."""
        return self._connection.place

    def engine(self, *, fresh: bool = False) -> Engine:
        """Return which engine it is."""
        if not fresh and (known := self._connection.known) is not None:
            return known  # each search asks twice
        return self.run("", lambda client: self._connection.engine(client, fresh=fresh))

    def engine_filter(self, filter: str | None, schema: Schema) -> filters.EngineFilter:
        """Translate a filter into this engine's words."""
        if not filters.given(filter):
            return filters.EngineFilter("")
        engine = self.engine()
        milvus = filters.MILVUS if engine.numbers >= (2, 4) else filters.MILVUS_2_3
        return filters.for_engine(filter, schema, filters.LITE_2 if engine.lite2 else filters.LITE_3 if engine.lite3 else milvus)

    @contextlib.contextmanager
    def gate(self, *, alone: bool) -> Iterator[None]:
        """Pass the engine's gate, unless this thread is inside already."""
        if getattr(self._inside, "now", False):
            yield
            return
        with self._gate(alone=alone):
            self._inside.now = True
            try:
                yield
            finally:
                self._inside.now = False

    def run(
        self,
        collection: str,
        call: Callable[[MilvusClient], _T],
        *,
        filter: str = "",
        quoted: str = "",
        permit: Permit = always,
        patient: bool = False,
        gated: bool = False,
        cuts: int = _CUTS,
    ) -> _T:
        """Run one call, repeat it while the engine is away or busy and `permit` allows it, and translate its errors.

        `quoted`: the user's words in the call, besides the filter. `patient`: an engine that is silent counts as away, and has
        longer to answer from then on; otherwise the call is repeated once. `gated`: the call waits while a record is replaced.

        Raises:
            EngineKilled: The connection broke `cuts` times under the call: most likely the call itself ends the engine.
        """
        request = _Request(collection, call, filter, quoted, permit, patient, gated, cuts)
        with timing.under_way(f"Milvus at {self._connection.place}", self._patience, slow=True):
            return self._repeated(request)

    def _repeated(self, request: _Request[_T]) -> _T:
        connection, deadline = self._connection, time.monotonic() + self._patience
        seen: Counter[Failure] = Counter()
        while True:
            client = None
            # If several calls were under way when the engine ended, any of them may end it again, so each is sent alone.
            alone = seen[Failure.CUT] > 0
            gate = self.gate(alone=alone) if request.gated or alone else contextlib.nullcontext()
            try:
                with gate:
                    client = connection.get()
                    request.permit()
                    return request.call(client)
            except foreign_errors() as exc:
                cause = exc
            failure = self._classified(cause, client, request)
            if client and (failure is Failure.CUT or (failure in TRANSIENT and broken(cause))):
                connection.drop(client)
            seen[failure] += 1
            permitted, late = request.permit is not always, time.monotonic() > deadline
            step = next_step(failure, seen, cuts=request.cuts, patient=request.patient, permitted=permitted, late=late)
            if step is Step.KILLED:
                raise self._killed(request, seen[failure]) from cause
            if step is Step.FATAL:
                raise self._translated(cause, failure, request.collection, within=connection.timeout) from cause
            if step is Step.SLOW:
                connection = self._slow
            timing.tried_in_vain()
            longest = _APART if failure is Failure.CUT else min(_PAUSE, 0.1 * 2 ** min(seen.total(), 8))
            time.sleep(_random.uniform(0.0, longest))

    def _classified(self, exc: BaseException, client: MilvusClient | None, request: _Request[_T]) -> Failure:
        if client and code_of(exc) == NOT_LOADED and self._loads(client, request.collection):
            return Failure.BUSY
        return classify(exc, sent=client is not None, quoted=f"{request.filter} {request.quoted}")

    def _loads(self, client: MilvusClient, collection: str) -> bool:
        """Return whether a collection that is not loaded will be: a server loads it as it recovers, Lite 3 when told to.

        Lite 3 releases all collections when its process ends. A collection that an administrator released on a server stays so.
        """
        if is_loading(client, collection):
            return True
        try:
            if not self._connection.engine(client, fresh=False).lite3:
                return False
            client.load_collection(collection, _async=True, **ONCE)
        except foreign_errors():
            return False
        _log.info("Collection %r is loaded again: Milvus Lite had released it", collection, extra={"action": "load"})
        return True

    def _killed(self, request: _Request[_T], times: int) -> EngineKilled:
        what = f" with the filter {request.filter!r}" if request.filter.strip() else ""
        way_out = "ask differently" if what else "look at its log and its memory"
        return EngineKilled(
            f"Milvus at {self.place()} ended {counted(times, 'time')} during a call on {request.collection!r}{what}, which is "
            f"not sent again; {way_out}"
        )

    def _translated(self, exc: BaseException, failure: Failure, collection: str, *, within: float) -> RmvdbError:
        place, status, text = self.place(), status_of(exc), text_of(exc)
        if status == "DEADLINE_EXCEEDED":
            return EngineUnavailable(f"Milvus at {place} gave no answer within {within:g} s; look at its load and its log")
        if failure in TRANSIENT and code_of(exc) != NOT_LOADED:
            way_out = "see that it runs, or correct milvus.uri"
            return EngineUnavailable(f"Milvus at {place} cannot be reached ({text}); {way_out}")
        if status in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            return Refused(f"Milvus at {place} refused the token ({text}); correct milvus.token")
        if code_of(exc) == MISSING:
            self.schemas.pop(collection, None)
            self.introduced.discard((place, collection))
            return CollectionMissing(f"There is no collection {collection!r} at {place}{self._others(collection)}")
        if lacks_database(exc):
            return EngineError(f"Milvus at {place} has no such database ({text}); create it, or correct the name in milvus.uri")
        if code_of(exc) == NOT_LOADED:
            way_out = f"load it with MilvusClient({place!r}).load_collection({collection!r})"
            return EngineError(f"Collection {collection!r} is not loaded, so that it cannot be searched; {way_out}")
        kind = Refused if failure is Failure.REFUSED else EngineError
        return kind(f"Milvus at {place} refused a call on {collection!r}: {text}")

    def _others(self, collection: str) -> str:
        """Name the collections that exist, if this program may list them."""
        with contextlib.suppress(*foreign_errors()):
            found = self._connection.get().list_collections(**ONCE)
            names = [name for name in found if not name.startswith(MARK_PREFIX)]
            return f"; {offer(collection, names, hint='it has no collection yet')}"
        return ""
