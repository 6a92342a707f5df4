"""Calls to an engine: repeated while it is unavailable, and what it raises in rmvdb's words."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

from rmvdb import timing
from rmvdb.engines import filters
from rmvdb.engines.milvus.connection import Connection, Engine
from rmvdb.engines.milvus.driver import ONCE, foreign_errors
from rmvdb.engines.milvus.failures import MISSING, NOT_LOADED, Failure, broken, classify, code_of, is_loading, status_of, text_of
from rmvdb.errors import CollectionMissing, EngineError, EngineKilled, EngineUnavailable, Refused, RmvdbError, offer
from rmvdb.protocols import Permit, always
from rmvdb.text import counted
from rmvdb.types import MARK_PREFIX, Schema

if TYPE_CHECKING:
    from rmvdb.engines.milvus.driver import MilvusClient

_log = logging.getLogger(__name__)
#: Of its own: an application may have seeded the one that all share.
_random = random.Random()  # noqa: S311 (no secret)
_T = TypeVar("_T")

#: After which of its failures a call is sent again.
_AGAIN = {Failure.BUSY, Failure.SILENT, Failure.CUT}
#: How often the connection may break under one call.
_CUTS = 2
#: Seconds between two attempts of a call, at the most, and where the connection broke under the first.
_PAUSE, _APART = 2.0, 1.0
#: How often a call that got no answer is sent again, where somebody waits for it.
_SILENCES = 1


class Gate(Protocol):
    """Keeps searches away while a record is replaced; for an engine that does not do so itself (`lite.gate`)."""

    def __call__(self, *, alone: bool) -> AbstractContextManager[None]:
        """Enter with others, or alone."""
        ...


def _open_gate(*, alone: bool) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def level(strong: bool) -> str:
    """The consistency level of a call."""
    return "Strong" if strong else "Bounded"


class Session:
    """What a store knows of its engine, and how it calls it; the verbs of `MilvusStore` are functions of a session."""

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
        #: For what an engine was silent to and somebody waits for.
        self._slow = Connection(address, token, max(timeout, patience))
        self._patience = patience
        self._staleness = staleness
        self._gate, self._inside = gate, threading.local()
        #: Of each collection, until it is described again or the engine says that there is none.
        self.schemas: dict[str, Schema] = {}
        #: Rows written into each collection since its last flush.
        self.unflushed: dict[str, int] = {}
        #: The flushed segments of each collection, as this session saw them last before a flush.
        self.flushed: dict[str, set[int]] = {}
        #: The collections whose schema pymilvus has seen, by where they are.
        self.introduced: set[tuple[str, str]] = set()
        #: Bytes of a row of a collection and fields, as the last ones were.
        self.weights: dict[tuple[str, ...], int] = {}

    @property
    def staleness(self) -> float:
        """Seconds within which the engine shows every write to every search: none for Milvus Lite, 5 (gracefulTime) else."""
        if self._staleness is not None:
            return self._staleness
        return 0.0 if self.engine().name == "milvus-lite" else 5.0

    @property
    def settles_at_once(self) -> bool:
        """Whether every search finds what was written without a flush: a server's filtered ones miss much of it."""
        return self.engine().name == "milvus-lite"

    def version(self) -> str:
        """The engine and its version, such as "milvus 2.3.5"; raises EngineUnavailable if it does not answer."""
        return " ".join(self.engine(fresh=True))

    def close(self) -> None:
        """Close the connections; the next call opens another."""
        self._connection.drop()
        self._slow.drop()

    def place(self) -> str:
        """Where the last call was sent."""
        return self._connection.place

    def engine(self, *, fresh: bool = False) -> Engine:
        """Which engine it is."""
        return self.run("", lambda client: self._connection.engine(client, fresh=fresh))

    def asked(self, filter: str | None, schema: Schema) -> filters.Asked:
        """The filter in words that this engine knows."""
        engine = self.engine()
        milvus = filters.MILVUS if engine.numbers >= (2, 4) else filters.MILVUS_2_3
        return filters.asked(filter, schema, filters.LITE_2 if engine.lite2 else filters.LITE_3 if engine.lite3 else milvus)

    @contextlib.contextmanager
    def gate(self, *, alone: bool) -> Iterator[None]:
        """Pass the engine's gate, unless this thread is inside."""
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
        """Run one call, again while the engine is away or busy and `permit` allows it, and translate what it raises.

        `quoted`: what else than the filter the call carries of the user's words. `patient`: an engine that is silent is away,
        too, and has longer to answer from then on: what it is slow at, many short calls only make slower. Else it is asked once
        more. `gated`: while a record is replaced it waits. EngineKilled where the connection broke `cuts` times under the call:
        most likely the call itself ends the engine.
        """
        with timing.under_way(f"Milvus at {self._connection.place}", self._patience, slow=True):
            return self._repeated(
                collection, call, filter=filter, quoted=quoted, permit=permit, patient=patient, gated=gated, cuts=cuts
            )

    def _repeated(
        self,
        collection: str,
        call: Callable[[MilvusClient], _T],
        *,
        filter: str,
        quoted: str,
        permit: Permit,
        patient: bool,
        gated: bool,
        cuts: int,
    ) -> _T:
        connection, deadline = self._connection, time.monotonic() + self._patience
        seen: Counter[Failure] = Counter()
        while True:
            client = None
            # Of several calls that were under way when the engine ended one may end it again: by itself.
            gate = self.gate(alone=seen[Failure.CUT] > 0) if gated or seen[Failure.CUT] else contextlib.nullcontext()
            try:
                with gate:
                    client = connection.get()
                    permit()
                    return call(client)
            except foreign_errors() as exc:
                cause, failure = exc, classify(exc, sent=client is not None, quoted=f"{filter} {quoted}")
                if client and code_of(exc) == NOT_LOADED and self._loads(client, collection):
                    failure = Failure.BUSY
            if client and (failure is Failure.CUT or (failure in _AGAIN and broken(cause))):
                connection.drop(client)
            seen[failure] += 1
            # Repeated, no call changes anything more. A server that recovers may swallow the first one.
            silent_too_often = seen[Failure.SILENT] > _SILENCES and not patient and permit is always
            if failure is Failure.CUT and seen[failure] >= cuts:
                raise self._killed(collection, filter, seen[failure]) from cause
            if failure not in _AGAIN or silent_too_often or time.monotonic() > deadline:
                raise self._translated(cause, failure, collection, filter, within=connection.timeout) from cause
            if failure is Failure.SILENT and patient:
                connection = self._slow
            timing.tried_in_vain()
            longest = _APART if failure is Failure.CUT else min(_PAUSE, 0.1 * 2 ** min(seen.total(), 8))
            time.sleep(_random.uniform(0.0, longest))

    def _loads(self, client: MilvusClient, collection: str) -> bool:
        """Whether a collection that is not loaded will be: a server loads it as it recovers, Lite 3 when it is told.

        Lite 3 lets go of all collections as its process ends. What an administrator released on a server stays so.
        """
        if is_loading(client, collection):
            return True
        try:
            if not self._connection.engine(client, fresh=False).lite3:
                return False
            client.load_collection(collection, _async=True, **ONCE)
        except foreign_errors():
            return False
        _log.info("Collection %r is loaded again: Milvus Lite had let it go", collection, extra={"action": "load"})
        return True

    def _killed(self, collection: str, filter: str, times: int) -> EngineKilled:
        what = f" with the filter {filter!r}" if filter.strip() else ""
        way_out = "ask differently" if what else "look at its log and its memory"
        return EngineKilled(
            f"Milvus at {self.place()} ended {counted(times, 'time')} during a call on {collection!r}{what}, which is not sent "
            f"again; {way_out}"
        )

    def _translated(self, exc: BaseException, failure: Failure, collection: str, filter: str, *, within: float) -> RmvdbError:
        place, status, text = self.place(), status_of(exc), text_of(exc)
        if status == "DEADLINE_EXCEEDED":
            return EngineUnavailable(f"Milvus at {place} gave no answer within {within:g} s; look at its load and its log")
        if failure in _AGAIN and code_of(exc) != NOT_LOADED:
            way_out = "see that it runs and that the address is right"
            return EngineUnavailable(f"Milvus at {place} cannot be reached ({text}); {way_out}")
        if status in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            return Refused(f"Milvus at {place} refused the token ({text}); correct it")
        if code_of(exc) == MISSING:
            self.schemas.pop(collection, None)
            self.introduced.discard((place, collection))
            return CollectionMissing(f"There is no collection {collection!r} at {place}{self._others(collection)}")
        if code_of(exc) == NOT_LOADED:
            way_out = f"load it with MilvusClient({place!r}).load_collection({collection!r})"
            return EngineError(f"Collection {collection!r} is not loaded, so that it cannot be searched; {way_out}")
        kind = Refused if failure is Failure.REFUSED else EngineError
        return kind(f"Milvus at {place} refused a call on {collection!r}: {text}")

    def _others(self, collection: str) -> str:
        """What there is instead, where this program may ask."""
        with contextlib.suppress(*foreign_errors()):
            found = self._connection.get().list_collections(**ONCE)
            return f"; {offer(collection, [name for name in found if not name.startswith(MARK_PREFIX)])}"
        return ""
