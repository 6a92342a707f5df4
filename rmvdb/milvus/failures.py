"""What Milvus, pymilvus and gRPC say when a call fails, read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rmvdb.milvus.driver import ONCE, foreign_errors

if TYPE_CHECKING:
    from rmvdb.milvus.driver import MilvusClient

#: Milvus' own codes: there is no such collection, and it is not loaded.
MISSING, NOT_LOADED = 100, 101
#: Milvus' own codes for "not now": unavailable, busy, rate limit, (not) recovering, no replica, channel, segment or node.
_PASSING = {2, 4, 8, 103, 106, 401, 500, 501, 503, 601, 602, 901, 902, 903, 904}
#: pymilvus' codes for a channel that is closed and for one that it could not repair.
BROKEN = {1, 2}
_PASSING_TEXT = re.compile(
    r"no available shard|channel .*not available|not (ready|healthy|serviceable)|recovering|node .*(offline|not match|not found)"
    r"|closed channel|should create connection first|delegator not found"
    r"|has not been init"  # Milvus Lite answers a moment before it has started
)


def is_passing(exc: BaseException) -> bool:
    """Whether the same call may be answered a little later."""
    if status_of(exc) in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return False
    return status_of(exc) in ("UNAVAILABLE", "CANCELLED") or code_of(exc) in _PASSING or bool(_PASSING_TEXT.search(text_of(exc)))


def is_loading(client: MilvusClient, collection: str) -> bool:
    """Whether a server is still loading the collection, as after its restart, rather than keeping it released."""
    try:
        state = client.get_load_state(collection, **ONCE)["state"]
    except foreign_errors():
        return False
    return bool(state.name in ("Loading", "Loaded"))


def status_of(exc: BaseException) -> str:
    """The name of the gRPC status, "" for an error of Milvus itself; a failure to connect hides it in its cause."""
    code = getattr(exc, "code", None)
    name = getattr(code() if callable(code) else code, "name", "")
    cause = exc.__cause__
    return name if name or cause is None or cause is exc else status_of(cause)


def code_of(exc: BaseException) -> int:
    """Milvus' own code, 0 for an error of gRPC."""
    code = getattr(exc, "code", None)
    return code if isinstance(code, int) and not status_of(exc) else 0


def text_of(exc: BaseException) -> str:
    """What it says, in one line."""
    details = getattr(exc, "details", None)
    text = str(getattr(exc, "message", "") or (details() if callable(details) else "") or exc)
    return " ".join(re.sub(r"^\[\w+\] Retry run out of \d+ retry times, (message=)?", "", text).split())[:300]
