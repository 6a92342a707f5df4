"""Errors of Milvus, pymilvus and gRPC: their meaning for a call, and whether to send it again."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rmvdb.engines.milvus.driver import ONCE, foreign_errors

if TYPE_CHECKING:
    from rmvdb.engines.milvus.driver import MilvusClient

#: Milvus' own codes: the collection does not exist, it is not loaded, the database does not exist.
MISSING, NOT_LOADED, _NO_DATABASE = 100, 101, 800
#: How 2.3.5 says that the database does not exist, under a code that says nothing.
_NO_DATABASE_TEXT = re.compile(r"database:\S+ not found")
#: The code of segcore, which reads filters and holds vectors, in Milvus Lite 2.5.
SEGCORE = 2000
#: Milvus' own codes for "not now": unavailable, busy, rate limit, (not) recovering, no replica, channel, segment (it was merged
#: into another one meanwhile) or node; a proxy that ends cancels what it waits for.
_TRANSIENT_CODES = {2, 4, 8, 103, 106, 401, 500, 501, 503, 600, 601, 602, 901, 902, 903, 904, 10_000}
#: Milvus' own code for a call that a part of it did not answer in time.
_TIMED_OUT = 10_001
#: Codes for a request that is refused before anything is done: denied, no such collection or field, an invalid parameter (6 is
#: Lite 3's code for it).
_INVALID = {6, 9, MISSING, 1100, 1700, 1701}
#: pymilvus' code for a channel that it could not open.
_NOT_CONNECTED = 2
#: The words of Milvus and Lite under a code that says nothing (unexpected error, segcore), by code. The groups hold the words
#: that decide.
_TRANSIENT_TEXT = {
    65535: re.compile(
        r"(no available shard|not (?:ready|healthy|serviceable)|recovering|delegator not found|segment not found\[segment=)"
        r"|channel (?=.*?(not available))|node (?=.*?(offline|not match|not found))"
        r"|(util/grpcclient|find no available \w+, check)"  # a part of Milvus does not reach another one
        r"|(context (?:canceled|deadline exceeded))"  # a busy server gave up a part of the call
    ),
    SEGCORE: re.compile(r"(mmap manager has not been init)", re.IGNORECASE),  # Lite answers a moment before it has started
}
_TRANSIENT_TEXT[1] = _TRANSIENT_TEXT[65535]  # servers before 2.3
#: The words of segcore and of a server for an answer over their limit, which they estimate from the average record.
_TOO_LARGE = re.compile(r"(results exceed the (?:limit size|maxOutputSize))")
#: How often a call that got no answer is sent again, if it is neither patient nor permitted.
_SILENCES = 1
#: The places in its source that Milvus puts before its message.
_TRACE = re.compile(r"(stack trace: )?(/\S+\.go:\d+ \S+ ?)+(: )?")
#: The messages of pymilvus and gRPC, with the code of an unexpected error, for a client that another thread has closed.
_CLOSED = ("should create connection first", "Unexpected error, message=<Cannot invoke RPC")
#: How gRPC's message begins if a connection broke under a call. Every other unavailable call may be sent again: one that never
#: left because no connection could be made, or one that a proxy answered while its servers start.
_BROKE = ("Stream removed", "Socket closed", "Connection reset", "recvmsg:", "sendmsg:", "Broken pipe", "End of TCP stream")


class Failure(enum.Enum):
    """The meaning of a failed call for its caller."""

    #: Nothing was done, and the same call would get the same answer.
    REFUSED = enum.auto()
    #: The engine failed at it, and may have done a part. The same call would most likely fail again.
    FAILED = enum.auto()
    #: The engine is away or busy: the same call may be answered a little later.
    BUSY = enum.auto()
    #: No answer came in time: it may have been done.
    SILENT = enum.auto()
    #: The connection broke while the call was under way: it may have been done, and it may have ended the engine.
    CUT = enum.auto()


#: The failures after which a call may be sent again.
TRANSIENT = {Failure.BUSY, Failure.SILENT, Failure.CUT}


def classify(exc: BaseException, *, sent: bool, quoted: str = "") -> Failure:
    """Return what an error means, by its code; if the code says nothing, by Milvus' words, and not by those of the user alone.

    `sent`: there was a connection. `quoted`: the user's words in the call, which an engine may quote.
    """
    status, code = status_of(exc), code_of(exc)
    if status in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return Failure.REFUSED
    if not sent:
        away = status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED") or code == _NOT_CONNECTED or _says_closed(exc)
        return Failure.BUSY if away else Failure.REFUSED
    if status:
        return _by_status(status, exc)
    if code == _TIMED_OUT:
        return Failure.SILENT
    if code in _TRANSIENT_CODES or getattr(exc, "retriable", False):
        return Failure.BUSY
    if code in _INVALID or getattr(exc, "is_input_error", False):
        return Failure.REFUSED
    if _says_closed(exc) or (code in _TRANSIENT_TEXT and _says(_TRANSIENT_TEXT[code], exc, quoted)):
        return Failure.BUSY
    return Failure.FAILED


class Step(enum.Enum):
    """The next step after a failed call."""

    #: Send it again.
    RETRY = enum.auto()
    #: Send it again, and wait longer for the answer.
    SLOW = enum.auto()
    #: Give up: most likely the call itself ends the engine.
    KILLED = enum.auto()
    #: Give up.
    FATAL = enum.auto()


def next_step(failure: Failure, seen: Mapping[Failure, int], *, cuts: int, patient: bool, permitted: bool, late: bool) -> Step:
    """Decide by the first line that fits. A repeated call changes nothing more.

    `seen`: the failures of this call, this one included. `patient`: a silent engine counts as away. `permitted`: a permit ends
    the repeats. `late`: the time for repeats is over.

    | failure | step |
    |---|---|
    | CUT, `cuts` times | KILLED |
    | REFUSED, FAILED | FATAL |
    | SILENT twice, neither patient nor permitted | FATAL: a server that recovers may swallow a call, but not two |
    | any other, late | FATAL |
    | SILENT, patient | SLOW: an engine that is slow only gets slower by many short calls |
    | any other | RETRY |
    """
    if failure is Failure.CUT and seen[failure] >= cuts:
        return Step.KILLED
    if failure not in TRANSIENT or late:
        return Step.FATAL
    if failure is not Failure.SILENT:
        return Step.RETRY
    if patient:
        return Step.SLOW
    return Step.RETRY if permitted or seen[failure] <= _SILENCES else Step.FATAL


def _by_status(status: str, exc: BaseException) -> Failure:
    if status == "UNAVAILABLE":
        return Failure.CUT if _details(_root(exc)).startswith(_BROKE) else Failure.BUSY
    known = {"DEADLINE_EXCEEDED": Failure.SILENT, "CANCELLED": Failure.BUSY, "UNIMPLEMENTED": Failure.REFUSED}
    return known.get(status, Failure.FAILED)


def _says_closed(exc: BaseException) -> bool:
    return code_of(exc) == 1 and text_of(exc).startswith(_CLOSED)  # pymilvus may put its count of tries before it


def _says(pattern: re.Pattern[str], exc: BaseException, quoted: str) -> bool:
    """Return whether an engine's sentence fits. It may quote the user, so one of the words that decide must be its own."""
    users = set(re.findall(r"\w+", quoted))
    fits = pattern.finditer(_said(exc))
    return any(word not in users for found in fits for group in found.groups("") for word in re.findall(r"\w+", group))


def is_too_large(exc: BaseException, quoted: str) -> bool:
    """Return whether the engine refuses to give so much in one answer. `quoted`: the user's words in the call."""
    return _says(_TOO_LARGE, exc, quoted)


def is_loading(client: MilvusClient, collection: str) -> bool:
    """Return whether a server is still loading the collection, as after a restart, rather than keeping it released."""
    try:
        state = client.get_load_state(collection, **ONCE)["state"]
    except foreign_errors():
        return False
    return bool(state.name in ("Loading", "Loaded"))


def status_of(exc: BaseException) -> str:
    """Return the name of the call's gRPC status, "" for an error of Milvus itself."""
    return _status(_root(exc))


def code_of(exc: BaseException) -> int:
    """Return Milvus' own code, 0 for an error of gRPC."""
    code = getattr(exc, "code", None)
    return int(code) if isinstance(code, int) and not status_of(exc) else 0


def text_of(exc: BaseException) -> str:
    """Return the message in one line, without the places in Milvus' source that it came through."""
    return _TRACE.sub("", _said(exc))[:300]


def _said(exc: BaseException) -> str:
    text = str(getattr(exc, "message", "") or _details(exc) or exc)
    return " ".join(re.sub(r"^\[\w+\] Retry run out of \d+ retry times, (message=)?", "", text).split())


def broken(exc: BaseException) -> bool:
    """Return whether the connection must be replaced."""
    return bool(status_of(exc)) or code_of(exc) == _NOT_CONNECTED or _says_closed(exc)


def _root(exc: BaseException) -> BaseException:
    """Return the gRPC error that ended the call, if there is one.

    If the connection broke, pymilvus connects again at once. If that fails too, it raises that error while it handles the first.
    """
    if getattr(exc, "code", None) != _NOT_CONNECTED:
        return exc
    connecting = exc.__cause__ if exc.__cause__ not in (None, exc) else exc.__context__
    call = connecting.__context__ if connecting is not None and _status(connecting) else None
    return next((each for each in (call, connecting) if each is not None and _status(each)), exc)


def _status(exc: BaseException) -> str:
    code = getattr(exc, "code", None)
    return str(getattr(code() if callable(code) else code, "name", "")) if not isinstance(code, int) else ""


def _details(exc: BaseException) -> str:
    details = getattr(exc, "details", None)
    return str((details() if callable(details) else "") or "")


def lacks_database(exc: BaseException) -> bool:
    """Whether the server has no database of the name in its address."""
    return code_of(exc) == _NO_DATABASE or _NO_DATABASE_TEXT.fullmatch(text_of(exc)) is not None
