"""Moves the records first that searches asked for: their vectors are made already, and later searches embed less."""

from __future__ import annotations

import logging
import time

from rmvdb import errors
from rmvdb.registry.codec import key
from rmvdb.registry.registry import Registry

log = logging.getLogger(__name__)

#: Seconds between two looks. After a long look, the pause is SHARE times as long as the look.
PAUSE, SHARE = 3.0, 20
#: Records that are moved first at once, and batches that one step reads: a step takes some hundredths of a second.
RECORDS, BATCHES = 1000, 100


class MovedFirst:
    """Finds the batches of the records that searches asked for, one page of the work list at a time.

    So memory is bounded by that page, and the worker goes on between two pages, however long the work list is.
    """

    #: The calls that change something. `tests/integration/crash_points` kills the process at each of them.
    CALLS = ("registry.move_first",)

    def __init__(self, registry: Registry, upgrade: int) -> None:
        self._registry, self._upgrade = registry, upgrade
        #: The requests in work: the record of each row. Empty between two looks.
        self._wanted: dict[int, str] = {}
        self._after, self._found, self._left = 0, list[int](), set[str]()
        self._next, self._took = 0.0, 0.0

    def step(self) -> None:
        """Read one page of the work list, and move the records that were found once it has ended."""
        began = time.monotonic()
        if began < self._next:
            return
        try:
            ended = self._step()
        except errors.RegistryError as exc:  # the order is a favour: no batch may fail for it
            log.info("Records that searches asked for could not be moved first: %s", exc, extra={"action": "asked-for"})
            self._wanted, ended = {}, True
        self._took += time.monotonic() - began
        if ended:
            self._next, self._took = time.monotonic() + max(PAUSE, SHARE * self._took), 0.0

    def _step(self) -> bool:
        if not self._wanted:
            self._wanted = self._registry.asked_for(self._upgrade, most=RECORDS)
            self._after, self._found, self._left = 0, [], set(self._wanted.values())
            if not self._wanted:
                return True
        page = self._registry.pending_batches(self._upgrade, after=self._after, most=BATCHES)
        for number, ids in page.items():
            if there := self._left.intersection(map(key, ids)):
                self._found.append(number)
                self._left -= there
            self._after = number
        if self._left and len(page) == BATCHES:
            return False
        wanted, self._wanted = self._wanted, {}
        moved = self._registry.move_first(self._upgrade, set(wanted.values()), batches=self._found, rows=list(wanted))
        if moved:
            log.info("%s records that searches asked for are moved first", moved, extra={"action": "asked-for"})
        return True
