"""Forty texts to the middle of v1 → v2, and applications that write and search them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rmvdb.registry.codec import unpack_ids
from rmvdb.types import BatchState, Id
from tests.support.inprocess import Gallery

V1, V2 = "texts_v1", "texts_v2"


def go_half_way(made: Gallery) -> None:
    """Forty texts to the middle of v1 → v2: 1 to 20 are moved, and some were written since."""
    made.worker().run(made.task, made.backfill, until=0.5)
    with made.client() as client:
        # In v2 alone; in both; new.
        write(made, client, 5, 25, 50)
        client.delete([6, 30])
        del made.source.of[6], made.source.of[30]


def write(gallery: Gallery, client: object, *ids: int) -> None:
    for id in ids:
        gallery.source.of[id] = f"newer {id}"
        client.upsert([{"id": id, "item": gallery.source.of[id], "n": 1}])  # type: ignore[attr-defined]


def listed(gallery: Gallery, state: BatchState | None = None) -> list[list[Id]]:
    return [unpack_ids(row.ids) for row in gallery.registry.batches(gallery.upgrade.id, state=state)]


@contextmanager
def searching(gallery: Gallery) -> Iterator[list[str]]:
    """Give an application that asks for every record again and again; what was wrong with its answers."""
    wrong: list[str] = []
    stop = threading.Event()
    always = set(gallery.source.of)

    def ask() -> None:
        with gallery.client() as client:
            while not stop.is_set():
                found = [hit.id for hit in client.search("anything", limit=100)]
                got = [record.id for record in client.get(sorted(always))]
                wrong.extend(f"twice: {id}" for id, times in Counter(found).items() if times > 1)
                wrong.extend(f"missed: {id} among {client.plan.legs}" for id in always - set(found))
                wrong.extend(f"not got: {id}" for id in always - set(got))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield wrong
    finally:
        stop.set()
        thread.join()
