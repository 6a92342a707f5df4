"""SQLite and `fork`: while this process forks, it is in no call of SQLite and has no file of SQLite open.

SQLite keeps in memory which locks its process has on a file. A forked child inherits that memory, but not the locks, which belong
to the process. So it would wait for a lock that no thread releases, or write without one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from weakref import WeakSet

from sqlalchemy import Engine

#: Seconds for which a fork waits for the calls of other threads. A call of SQLite waits two seconds for its lock.
_PATIENCE = 10.0

_condition = threading.Condition()
#: The engines whose idle connections are closed before a fork.
_engines: WeakSet[Engine] = WeakSet()
#: How many calls each thread is in. A call may make another one.
_calls: dict[int, int] = {}
_forking = False


def watch(engine: Engine) -> None:
    """Close the idle connections of this engine before each fork."""
    _engines.add(engine)


@contextlib.contextmanager
def call() -> Iterator[None]:
    """Keep other threads from forking meanwhile. Wait while one forks."""
    thread = threading.get_ident()
    with _condition:
        _condition.wait_for(lambda: not _forking or thread in _calls)
        _calls[thread] = _calls.get(thread, 0) + 1
    try:
        yield
    finally:
        with _condition:
            _calls[thread] -= 1
            if not _calls[thread]:
                del _calls[thread]
            _condition.notify_all()


def _before() -> None:
    global _forking
    _condition.acquire()
    _forking = True
    thread = threading.get_ident()
    _condition.wait_for(lambda: not _calls.keys() - {thread}, timeout=_PATIENCE)
    for engine in list(_engines):
        engine.pool.dispose()


def _in_parent() -> None:
    global _forking
    _forking = False
    _condition.notify_all()
    _condition.release()


def _in_child() -> None:
    global _condition, _forking
    _condition, _forking = threading.Condition(), False
    thread = threading.get_ident()
    for other in _calls.keys() - {thread}:  # a thread that was waited for in vain is not in the child
        del _calls[other]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
