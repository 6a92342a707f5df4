"""The writes of one client: the moment that its searches wait for, so that each shows them and nothing that they replaced."""

from __future__ import annotations

import threading
from typing import NamedTuple

from rmvdb.protocols import VectorStore
from rmvdb.timing import seconds_since_boot, uptime
from rmvdb.types import Moment


class _Asked(NamedTuple):
    """A moment of the engine that comes after all earlier writes."""

    #: When the engine was asked for it, in seconds of `uptime`.
    at: float
    moment: Moment


class OwnWrites:
    """Remembers when this client last wrote. Its threads share it.

    One moment stands for all collections of the gallery: the engine's clock orders the writes of all. A record that a worker has
    moved since is found as other clients find it: it is in the new collection for one grace before it leaves the old one.
    """

    def __init__(self, store: VectorStore, *, engine_timeout: float) -> None:
        self._store, self._engine_timeout = store, engine_timeout
        self._lock = threading.Lock()
        #: When the last write ended, by `seconds_since_boot`: a time of day that is set forward does not make the engine show it.
        self._ended, self._asked = float("-inf"), _Asked(float("-inf"), 0)

    def note(self) -> None:
        """Note that a write has ended. It may have failed in part."""
        ended = seconds_since_boot()
        self._ask()
        with self._lock:
            self._ended = max(self._ended, ended)

    def moment(self, staleness: float) -> Moment | None:
        """Return the moment to search after, None once the engine shows the last write to every search.

        A search after a moment that is older than the staleness might lack what the engine owes to every search: other clients'
        writes, and records that workers have moved. So the moment is then asked for again.
        """
        if seconds_since_boot() - self._ended >= staleness + self._engine_timeout:
            return None
        now, asked = uptime(), self._asked
        return (asked if now - asked.at < staleness else self._ask()).moment

    def _ask(self) -> _Asked:
        """Ask for the present moment. It comes after every write that ended before this call, whichever thread made it."""
        asked = _Asked(uptime(), self._store.moment())
        with self._lock:  # another thread may have asked later, and have its answer already
            self._asked = max(self._asked, asked)
            return self._asked
