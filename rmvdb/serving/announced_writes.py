"""Announced writes: an intent, a wait for others at the records, the write within a deadline, and the mark that it is done.

Both sides announce, then look. A worker that comes later sees the intent. For a worker that came before, the write waits.
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

#: Seconds for which a write waits for other writers and workers at the same records.
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
        """Yield the plan to write by and the permit of each call once no other process is at these records. Then mark the write
        done.

        `only`, called once the records are free, selects those to write after all. `sketches`, read at the end: the sketches of
        the vectors written into the newest collection.

        If the engine refuses the first call and does nothing, the intents are withdrawn. If the write fails half-way, it stays
        announced until its deadline, because some calls may have reached the engine. If records kill the engine, their intents
        are withdrawn and the others marked done.
        """
        with self._alone_at(kind, ids) as (opened, permit):
            if only is not None:
                kept = set(only(opened.plan))
                opened, ids = self._withdraw_all_but(opened, ids, kept), [id for id in ids if id in kept]
            try:
                yield opened.plan, permit
            except errors.EngineKilled as exc:
                if exc.ids and (rest := self._withdraw_all_but(opened, ids, set(ids) - set(exc.ids))).intents:
                    self._close(rest, [id for id in ids if id not in exc.ids], sketches)
                raise
            self._close(opened, ids, sketches)

    def _close(self, opened: Opened, ids: Sequence[Id], sketches: Mapping[Id, bytes]) -> None:
        intents = dict(zip(ids, opened.intents, strict=True)) if sketches else {}
        with within(WRITE_LASTS):
            in_time = self._registry.close_intents(opened, {intents[id]: one for id, one in sketches.items()})
        if not in_time:
            raise self._too_late(ids)

    @contextmanager
    def alone_at(self, ids: Sequence[Id]) -> Iterator[tuple[ServingPlan, Permit]]:
        """Hold these records as `announced` does, for a change that no search shows. Withdraw the intents at the end."""
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
            # No call was sent, or the engine refused the first and did nothing: no other write needs to wait.
            if not calls or (calls == 1 and isinstance(exc, errors.Refused)):
                self._withdraw(opened)
            raise

    def _withdraw(self, opened: Opened) -> None:
        """Withdraw a write that failed. If the registry is away, the deadline ends it."""
        with suppress(errors.RegistryUnavailable), within(WRITE_LASTS / 3):
            self._registry.withdraw_intents(opened)

    def _withdraw_all_but(self, opened: Opened, ids: Sequence[Id], kept: Collection[Id]) -> Opened:
        keep = set(kept)
        self._registry.withdraw_intents(_narrowed(opened, [id not in keep for id in ids]))
        return _narrowed(opened, [id in keep for id in ids])

    def _too_late(self, ids: Sequence[Id]) -> errors.EngineError:
        return errors.EngineError(
            f"Writing {counted(len(ids), 'record')} of {self._gallery!r} took longer than {WRITE_LASTS:g} s; repeat the write"
        )

    def _wait(self, opened: Opened, ids: Sequence[Id], announced: float) -> float:
        """Wait until no other process is at these records, and extend the deadline meanwhile. Return when it was last
        announced."""
        began = uptime()
        while self._blocked(opened, ids, announced):
            if uptime() - began > WRITE_WAITS:
                raise errors.EngineError(
                    f"Other writers or workers have been at {counted(len(ids), 'record')} of {self._gallery!r} for over "
                    f"{WRITE_WAITS:g} s; repeat the write"
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
                    f"Writes of {self._gallery!r} have waited for over {WRITE_WAITS:g} s for clients to load a new serving "
                    "plan, or for rmvdb registry rebuild (see rmvdb status); repeat the write"
                )
            time.sleep(0.02)  # an epoch is changing: it waits for open writes, and new writes wait for it


def _narrowed(opened: Opened, which: Sequence[bool]) -> Opened:
    """Return the part of a write that `which` selects, one for each of its records: an id may come twice."""
    return replace(
        opened,
        intents=tuple(itertools.compress(opened.intents, which)),
        records=tuple(itertools.compress(opened.records, which)),
    )
