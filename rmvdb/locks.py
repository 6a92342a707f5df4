"""Locks of a whole process, which a forked child finds free.

A thread of the parent may hold such a lock for minutes, as one that loads a model does. The child has no such thread, so nobody
would release the lock there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

_all: WeakSet[ProcessLock] = WeakSet()


class ProcessLock:
    """A lock that is made anew in each forked child: `with name.now:` holds the lock of this process.

    `make`: `threading.Lock` or `threading.RLock`.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]] = threading.Lock) -> None:
        self._make = make
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Make it anew. A block that holds the former one releases that."""
        self.now = self._make()


def _in_child() -> None:
    for each in list(_all):
        each.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
