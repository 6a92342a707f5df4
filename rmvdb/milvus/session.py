"""Calls to an engine: repeated while it is unavailable, and what it raises in rmvdb's words."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

import tenacity

from rmvdb.errors import CollectionMissing, EngineError, EngineUnavailable, FilterError, RmvdbError, offer
from rmvdb.filters import closed, without_not
from rmvdb.milvus.connection import Connection, Engine
from rmvdb.milvus.driver import ONCE, foreign_errors
from rmvdb.milvus.failures import BROKEN, MISSING, NOT_LOADED, code_of, is_loading, is_passing, status_of, text_of
from rmvdb.protocols import Permit, always
from rmvdb.types import Schema

if TYPE_CHECKING:
    from rmvdb.milvus.driver import MilvusClient

_T = TypeVar("_T")

#: How often a call that got no answer is sent again, where somebody waits for it.
_SILENCES = 1
#: What the refusal of a filter says.
_FILTER_TEXT = re.compile(r"expr|predicate|parse|column \d+|PhyFilterBits|Cannot find field", re.IGNORECASE)


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


class _NotNowError(Exception):
    """The engine may answer if it is asked again; the cause says why it did not."""


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
        self.gate = gate
        #: Of each collection, until it is described again or the engine says that there is none.
        self.schemas: dict[str, Schema] = {}
        #: Rows written into each collection since its last flush.
        self.unflushed: dict[str, int] = {}
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

    def readable(self, filter: str, schema: Schema) -> str:
        """The filter in words that this engine knows."""
        return without_not(closed(filter), schema) if self.engine().lite2 else closed(filter)

    def run(
        self,
        collection: str,
        call: Callable[[MilvusClient], _T],
        *,
        filter: str = "",
        permit: Permit = always,
        patient: bool = False,
    ) -> _T:
        """Run one call, again while the engine is unavailable and `permit` allows it, and translate what it raises.

        `patient`: an engine that is silent is unavailable, too, and has longer to answer from then on: what it is slow at, many
        short calls only make slower. Else it is asked once more.
        """
        foreign, silences, connection = foreign_errors(), itertools.count(), self._connection

        def attempt() -> _T:
            nonlocal connection
            client = None
            try:
                client = connection.get()
                permit()
                return call(client)
            except foreign as exc:
                loading = client and code_of(exc) == NOT_LOADED and is_loading(client, collection)
                # Repeated, no call changes anything more. A server that recovers may swallow the first one.
                silent = status_of(exc) == "DEADLINE_EXCEEDED" and (patient or permit is not always or next(silences) < _SILENCES)
                if not (is_passing(exc) or loading or silent):
                    raise
                if client and (status_of(exc) or code_of(exc) in BROKEN):
                    connection.drop(client)
                if silent and patient:
                    connection = self._slow
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
            cause = exc.__cause__ or exc
            if status_of(cause) == "DEADLINE_EXCEEDED":
                raise self._translated(cause, collection, filter, within=connection.timeout) from cause
            way_out = "see that it runs and that the address is right"
            raise EngineUnavailable(
                f"Milvus at {self._connection.place} cannot be reached ({text_of(cause)}); {way_out}"
            ) from cause
        except foreign as exc:
            if code_of(exc) == MISSING:
                self.schemas.pop(collection, None)
                self.introduced.discard((self.place(), collection))
            raise self._translated(exc, collection, filter, within=connection.timeout) from exc

    def _translated(self, exc: BaseException, collection: str, filter: str, *, within: float) -> RmvdbError:
        place, text = self._connection.place, text_of(exc)
        if status_of(exc) == "DEADLINE_EXCEEDED":
            return EngineUnavailable(f"Milvus at {place} gave no answer within {within:g} s; look at its load and its log")
        if status_of(exc) in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            return EngineError(f"Milvus at {place} refused the token ({text}); correct it")
        if code_of(exc) == MISSING:
            return CollectionMissing(f"There is no collection {collection!r} at {place}{self._others(collection)}")
        if code_of(exc) == NOT_LOADED:
            way_out = f"load it with MilvusClient({place!r}).load_collection({collection!r})"
            return EngineError(f"Collection {collection!r} is not loaded, so that it cannot be searched; {way_out}")
        if filter and _FILTER_TEXT.search(text):
            return FilterError(f"The filter {filter!r} is not understood by Milvus: {text}")
        return EngineError(f"Milvus at {place} refused a call on {collection!r}: {text}")

    def _others(self, collection: str) -> str:
        """What there is instead, where this program may ask."""
        with contextlib.suppress(*foreign_errors()):
            return f"; {offer(collection, self._connection.get().list_collections(**ONCE))}"
        return ""
