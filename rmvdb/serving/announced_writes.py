"""Writes as others see them: announced, waited for, made under a deadline, marked done.

Both sides announce, then look: a worker that comes later sees the intent, and one that came before is waited for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType

from rmvdb import errors
from rmvdb.protocols import Permit
from rmvdb.registry.intents import Opened
from rmvdb.registry.registry import Registry
from rmvdb.registry.waiting import within
from rmvdb.text import counted
from rmvdb.timing import WRITE_LASTS, uptime
from rmvdb.types import Id, ServingPlan

#: Seconds for which a write waits for others at the same records.
WRITE_WAITS = 3 * WRITE_LASTS


class Writes:
    """The writes of one process, `name`, to one gallery. `engine_timeout`: seconds that one call of a store may take."""

    def __init__(self, gallery: str, *, registry: Registry, name: str, engine_timeout: float) -> None:
        self._gallery, self._registry, self._name, self._engine_timeout = gallery, registry, name, engine_timeout
        self._numbers = itertools.count(1)

    @contextmanager
    def announced(
        self,
        kind: str,
        ids: Sequence[Id],
        *,
        only: Callable[[ServingPlan], Collection[Id]] | None = None,
        sketches: Mapping[Id, bytes] = MappingProxyType({}),
    ) -> Iterator[tuple[ServingPlan, Permit]]:
        """The plan to write by, and the permit of each call, once nobody else is at these records; marked done at the end.

        `only`, asked then, says which of them are written after all; `sketches`, looked at in the end, are of the vectors
        that were written into the newest collection. A write that the engine refused before it did anything was never there. One
        that fails half-way stays announced until its deadline, since it is unknown what reached the engine; of one by which the
        engine ends the records that end it were never there, and the others are done.
        """
        with self._alone_at(kind, ids) as (opened, permit):
            if only is not None:
                opened = self._withdraw_all_but(opened, ids, only(opened.plan))
            try:
                yield opened.plan, permit
            except errors.EngineKilled as exc:
                if exc.ids and (rest := self._withdraw_all_but(opened, ids, set(ids) - set(exc.ids))).intents:
                    self._close(rest, [id for id in ids if id not in exc.ids], sketches)
                raise
            self._close(opened, ids, sketches)

    def _close(self, opened: Opened, ids: Sequence[Id], sketches: Mapping[Id, bytes]) -> None:
        of = dict(zip(ids, opened.intents, strict=True)) if sketches else {}
        with within(WRITE_LASTS):
            in_time = self._registry.close_intents(opened, {of[id]: made for id, made in sketches.items()})
        if not in_time:
            raise self._too_late(ids)

    @contextmanager
    def alone_at(self, ids: Sequence[Id]) -> Iterator[tuple[ServingPlan, Permit]]:
        """As `announced`, for who changes nothing that a search shows: afterwards it was never there."""
        with self._alone_at("upsert", ids) as (opened, permit):
            yield opened.plan, permit
            self._registry.withdraw_intents(opened)

    @contextmanager
    def _alone_at(self, kind: str, ids: Sequence[Id]) -> Iterator[tuple[Opened, Permit]]:
        opened, announced = self._announce(kind, ids)
        try:
            announced = self._wait(opened, ids, announced)
        except BaseException:
            self._withdraw(opened)
            raise

        calls = 0

        def in_time() -> None:
            nonlocal calls
            calls += 1
            if uptime() - announced > WRITE_LASTS - self._engine_timeout:
                raise self._too_late(ids)

        try:
            yield opened, in_time
        except BaseException as exc:
            # Nothing has left, or the first call was refused before anything was done: no other write needs to wait for it.
            if not calls or (calls == 1 and isinstance(exc, errors.Refused)):
                self._withdraw(opened)
            raise

    def _withdraw(self, opened: Opened) -> None:
        """Take back a write that failed; a registry that is away learns it from the deadline."""
        with suppress(errors.RegistryUnavailable), within(WRITE_LASTS / 3):
            self._registry.withdraw_intents(opened)

    def _withdraw_all_but(self, opened: Opened, ids: Sequence[Id], kept: Collection[Id]) -> Opened:
        meant, of = set(kept), list(zip(opened.intents, ids, strict=True))  # an id may be there twice
        self._registry.withdraw_intents(replace(opened, intents=tuple(intent for intent, id in of if id not in meant)))
        return replace(opened, intents=tuple(intent for intent, id in of if id in meant))

    def _too_late(self, ids: Sequence[Id]) -> errors.EngineError:
        return errors.EngineError(
            f"Writing {counted(len(ids), 'record')} of {self._gallery!r} took longer than {WRITE_LASTS:g} s; repeat the write"
        )

    def _wait(self, opened: Opened, ids: Sequence[Id], announced: float) -> float:
        """Until nobody else is at these records; when the write was announced last, since a deadline must not pass meanwhile."""
        began = uptime()
        while self._blocked(opened, ids, announced):
            if uptime() - began > WRITE_WAITS:
                raise errors.EngineError(
                    f"{counted(len(ids), 'record was', 'records were')} locked by other writers for over {WRITE_WAITS:g} s. "
                    f"Write {'it' if len(ids) == 1 else 'them'} again."
                )
            time.sleep(0.02)
            if uptime() - announced > WRITE_LASTS / 3:
                before, announced = announced, uptime()
                with within(WRITE_LASTS - (announced - before)):
                    extended = self._registry.extend_intents(opened, lasting=WRITE_LASTS)
                if not extended:
                    raise self._too_late(ids)
        return announced

    def _blocked(self, opened: Opened, ids: Sequence[Id], announced: float) -> bool:
        with within(WRITE_LASTS - (uptime() - announced)):
            return self._registry.blocked(opened, ids)

    def _announce(self, kind: str, ids: Sequence[Id]) -> tuple[Opened, float]:
        writer = f"{self._name}#{next(self._numbers)}"
        began = uptime()
        while True:
            started = uptime()
            with within(WRITE_LASTS):
                opened = self._registry.open_intents(self._gallery, kind, ids, client=writer, lasting=WRITE_LASTS)
            if opened is not None:
                return opened, started
            if started - began > WRITE_WAITS:
                raise errors.EngineError(
                    f"Writes of {self._gallery!r} have waited for over {WRITE_WAITS:g} s for clients to hear of a new serving "
                    "plan, or for rmvdb registry rebuild (rmvdb status says what is under way); repeat the write"
                )
            time.sleep(0.02)  # an epoch is changing: it waits for open writes to end, and new ones wait for it
