"""An upgrade that keeps its original (`--instant-rollback`, or method fct), and applications that write and search meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest

from rmvdb import errors
from rmvdb.learning.method import Method
from rmvdb.planning.plan import Plan, Stage
from rmvdb.planning.question import Question
from rmvdb.registry.tables import UpgradeRow
from rmvdb.serving.client import Client
from rmvdb.timing import WRITE_LASTS
from rmvdb.types import Record
from tests.support.inprocess import Gallery, TextEmbedder, vector
from tests.support.waiting import grow_old

ORIGINAL = "texts_v1"
METHOD = Method.NAIVE


def begin(gallery: Gallery, *, until: float = 1.0, to: str = "v2", method: Method | None = None) -> UpgradeRow:
    """Begin an upgrade as `rmvdb upgrade --instant-rollback` does, or `rmvdb upgrade --method fct`."""
    conductor, method = gallery.conductor(), method or METHOD
    instantly = method is not Method.FCT
    question = Question(
        gallery="texts", from_version="v1", to_version=to, method=method, order="random", instant_rollback=instantly
    )
    question = conductor.resolve(question)
    assert question.instant_rollback
    plan = conductor.plan(question)
    if plan.prediction and method is Method.FCT:  # forty texts, that others change meanwhile, say nothing of the quality
        plan = replace(plan, prediction=plan.prediction | {"verdict": "ok"})
    return conductor.begin(question, plan, gallery.worker(), until=until, cutover=until == 1.0)


def scheduled(plan: Plan) -> Plan:
    """Return the plan on a schedule: until t = 0.3 each model embeds the queries for its own collection."""
    return replace(plan, switch=0.3, stages=(Stage(calibrations=(None, None)), *plan.stages))


def go_on(gallery: Gallery, row: UpgradeRow | None) -> UpgradeRow:
    assert row is not None
    return gallery.conductor().advance(gallery.registry.upgrade(row.id), gallery.worker())


def back(gallery: Gallery, row: UpgradeRow) -> UpgradeRow:
    return go_on(gallery, gallery.conductor().roll_back(gallery.registry.upgrade(row.id)))


def expect_original(gallery: Gallery) -> None:
    """Expect every text in the original as v1 embeds it, and nothing else."""
    expect_holds(gallery, ORIGINAL, "v1")


def expect_holds(gallery: Gallery, collection: str, version: str) -> None:
    held = gallery.records(collection)
    assert held.keys() == gallery.source.of.keys()
    for id, record in held.items():
        assert np.allclose(record.vector, vector(version, gallery.source.of[id]), atol=1e-6), id  # type: ignore[arg-type]


@contextmanager
def busy(gallery: Gallery) -> Iterator[list[str]]:
    """Run applications that write records from 1 on, delete from 30 on, insert from 100 on, and search. Give the errors they
    see."""
    wrong: list[str] = []
    stop = threading.Event()
    always = set(range(20, 30))

    def write() -> None:
        with gallery.client() as client:
            for turn in range(10_000):
                if stop.is_set():
                    return
                id, gone, fresh = 1 + turn % 19, 30 + turn, 100 + turn
                insist(put, gallery, client, id, f"{turn} of {id}")
                insist(put, gallery, client, fresh, f"fresh {fresh}")
                if gone < 38:
                    insist(client.delete, gone)
                    gallery.source.of.pop(gone)
                shown = {record.id for record in client.get([id, fresh, gone])}
                wrong.extend(f"written and not shown: {each}" for each in {id, fresh} - shown)
                wrong.extend(f"deleted and shown: {gone}" for _ in shown & {gone} if gone < 38)

    def search() -> None:
        with gallery.client() as client:
            while not stop.is_set():
                found = [hit.id for hit in client.search("anything", limit=10_000)]
                wrong.extend(f"twice: {id}" for id, times in Counter(found).items() if times > 1)
                wrong.extend(f"missed: {id} by {client.plan}" for id in always - set(found))

    threads = [threading.Thread(target=work) for work in (write, search)]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def insist(write: Callable[..., object], *args: object) -> None:
    """Repeat a write that ended too late, as applications on a busy machine do."""
    for _ in range(1000):
        with suppress(errors.EngineError):
            write(*args)
            return
    write(*args)


def put(gallery: Gallery, client: Client, id: int, text: str) -> None:
    gallery.source.of[id] = text
    client.upsert([{"id": id, "item": text, "n": 1}])


def foreign(gallery: Gallery, id: int) -> None:
    """Insert into the original as another program does, which knows no other collection."""
    gallery.source.of[id] = f"foreign {id}"
    gallery.store.upsert(ORIGINAL, [Record(id=id, vector=vector("v1", f"foreign {id}"), fields={"n": 2})])


def die_in_the_copy(gallery: Gallery, row: UpgradeRow) -> None:
    """Let a conductor die after it has written some of the copy."""

    def die(call: str, collection: str) -> None:
        assert collection == row.old_collections[0]
        raise KeyboardInterrupt

    gallery.store.after = die
    with pytest.raises(KeyboardInterrupt):
        gallery.conductor().deploy(row)
    grow_old(gallery.registry, seconds=WRITE_LASTS + 1)
    gallery.store.after = lambda call, collection: None


def without_v1(version: str) -> TextEmbedder:
    """Load an embedder as a process without v1's code does."""
    if version == "v1":
        raise errors.ModelError("no v1 here")
    return TextEmbedder(version)
