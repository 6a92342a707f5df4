"""A kill, a late call and another program's write, for tests of the protocol in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

from rmvdb.protocols import always
from rmvdb.registry.tables import BatchRow
from rmvdb.serving.current_plan import CurrentPlan
from rmvdb.types import BatchState, Id
from tests.support.inprocess import Gallery
from tests.support.waiting import run_out


class Killed(BaseException):
    """The process ends here."""


def killed(*_: Any, **__: Any) -> NoReturn:
    raise Killed


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, gallery: Gallery, method: str) -> Iterator[None]:
    """Kill the caller of that method of the registry before the call leaves."""
    with monkeypatch.context() as patched:
        patched.setattr(gallery.registry, method, killed)
        with pytest.raises(Killed):
            yield


def drive(gallery: Gallery, *, seconds: float = 20.0) -> None:
    """Work until every batch is retired. Fail if that takes longer."""
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set)
    timer.start()
    gallery.worker().run(gallery.task, gallery.backfill, stop=stop)
    timer.cancel()
    assert gallery.registry.counts(gallery.upgrade.id).keys() == {BatchState.RETIRED}


def claimed(gallery: Gallery) -> BatchRow:
    batch = gallery.registry.claim(gallery.upgrade.id, "w", lease=60.0, grace=0.0, copy=True)
    assert batch is not None
    return batch


def copied(gallery: Gallery) -> None:
    gallery.backfill.copy(gallery.task, claimed(gallery), always)


def decided(gallery: Gallery) -> None:
    """Leave a batch to the next worker: its own died after it had decided which ids leave, and before any left."""
    copied(gallery)
    batch = claimed(gallery)
    gallery.store.before = once("delete", gallery.task.old[0], killed)
    with pytest.raises(Killed):
        gallery.backfill.retire(gallery.task, batch, always)
    gallery.store.before = lambda *_: None
    run_out(gallery.registry)


def remove(gallery: Gallery, id: Id) -> None:
    """Remove a record from the old collection as another program does."""
    gallery.source.of.pop(id)
    gallery.store.delete(gallery.task.old[0], [id])


def once(call: str, collection: str, act: Callable[[], object]) -> Callable[[str, str], None]:
    """Return a hook that acts at the first such call."""
    waiting = [act]

    def hook(made: str, where: str) -> None:
        if (made, where) == (call, collection) and waiting:
            waiting.pop()()

    return hook


def roll_back(gallery: Gallery) -> None:
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    conductor.deploy(back)
    conductor.list_work(gallery.registry.upgrade(back.id))
    conductor.backfill(gallery.registry.upgrade(back.id), gallery.worker())
    conductor.complete(gallery.registry.upgrade(back.id), gallery.worker())


def silent(plans: CurrentPlan) -> None:
    """Stop its thread, so that only searches ask for a plan."""
    plans._stop.set()
    plans._wake.set()
    plans._thread.join()
    plans._stop.clear()
