"""A registry that is lost in the middle of an upgrade, and the rebuild that brings it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmvdb.registry.manifest import Manifest
from rmvdb.serving.client import Client
from rmvdb.storage.archive import Archive
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import Id, Phase, Record, Vectors
from rmvdb.upgrade.rebuild import Rebuild
from tests.support.inprocess import Crash, Gallery, crash_at, drive, make, vector

#: Text and field `n` of every record that the gallery should hold.
Truth = dict[Id, tuple[str, int]]
UNTOUCHED: Truth = {id: (f"t{id}", 0) for id in range(1, 41)}
#: Records of every batch whose old vectors v1 would not make again today.
ODD = {id: np.roll(vector("v1", f"t{id}"), 1) for id in (2, 4, 13, 14, 24, 26, 35, 36)}


def rebuilding(gallery: Gallery, **options: Any) -> Rebuild:
    """Return the rebuild. Nothing of the lost registry is under way, so it waits for nothing."""
    manifest, archive = Manifest(LocalFolder(gallery.folder)), Archive(LocalFolder(gallery.folder / "archive"))
    whatever = {"quiet": 0.0, "lock": gallery.folder / "lock"} | options
    return Rebuild(registry=gallery.registry, store=gallery.store, archive=archive, manifest=manifest, **whatever)


def lose(gallery: Gallery) -> None:
    """Remove the database under everybody's feet."""
    for path in gallery.folder.glob("registry.sqlite*"):
        path.unlink()


def with_odd_vectors(folder: Path) -> Gallery:
    """Return forty texts, both collections served, four batches listed. Some of v1's vectors are ODD."""
    made = make(folder)
    made.store.upsert(made.task.old[0], [Record(id=id, vector=odd, fields={"n": 0}) for id, odd in ODD.items()])
    return made


def crash(gallery: Gallery, number: int, work: Callable[[Gallery], None] = drive) -> None:
    """Work until the given write, before which the process ends."""
    gallery.store.before = crash_at(number)
    with pytest.raises(Crash):
        work(gallery)
    gallery.store.before = lambda call, collection: None


def write(gallery: Gallery, client: Client, *, in_source: bool) -> Truth:
    """Write to records of every batch: some are moved, some copied, some not begun. Return the items then."""
    written: Truth = {3: ("three", 0), 12: ("twelve", 1), 25: ("five and twenty", 2), 38: ("38", 0), 100: ("hundred", 3)}
    written |= {id: (f"t{id}", 4) for id in (5, 16, 27, 37)}  # the same item, another field
    for id, (text, n) in written.items():
        client.upsert([{"id": id, "item": text, "n": n}])
    # Where ψ makes what is written to the old collection, that is not what v1 makes of it.
    still = gallery.store.get(gallery.task.old[0], list(written))
    psi = [Record(id=record.id, vector=np.flip(vector("v1", "ψ")), fields=record.fields) for record in still]
    gallery.store.upsert(gallery.task.old[0], psi)
    client.delete([1, 15, 28, 39])
    if in_source:
        gallery.source.of |= {id: text for id, (text, _) in written.items()}
    gone = (1, 15, 28, 39)
    return {id: value for id, value in (UNTOUCHED | written).items() if id not in gone}


def go_on(gallery: Gallery, number: int | None = None) -> None:
    """Go on to the cut-over, which verifies."""
    row = gallery.registry.upgrade(number or gallery.upgrade.id)
    assert gallery.conductor().advance(row, gallery.worker()).phase == Phase.CUT_OVER


def roll_back(gallery: Gallery) -> None:
    """Roll back to v1 from the present state."""
    active = gallery.registry.active_upgrade(gallery.upgrade.gallery_id)
    assert active is not None
    back = active if active.undoes else gallery.conductor().roll_back(active)
    assert back is not None
    go_on(gallery, back.id)


def expect(gallery: Gallery, truth: Truth, version: str, *, odd: Mapping[Id, Vectors] = ODD) -> None:
    """Expect the truth in one collection, as that version embeds it, and nothing in the other."""
    held = gallery.held()
    full, empty = ("new", "old") if version == "v2" else ("old", "new")
    assert held[empty] == {}
    assert {id: record.fields["n"] for id, record in held[full].items()} == {id: n for id, (_, n) in truth.items()}
    for id, record in held[full].items():
        own = odd[id] if version == "v1" and id in odd else vector(version, truth[id][0])
        assert np.allclose(record.vector, own, atol=1e-6), id  # type: ignore[arg-type]


def lost_before_a_write(gallery: Gallery, number: int) -> None:
    """Lose the registry before that write of a worker. Expect every record and every client's write in the end."""
    crash(gallery, number)
    with gallery.client() as client:
        truth = write(gallery, client, in_source=False)
        lose(gallery)
        rebuilding(gallery).run()
        assert {hit.id for hit in client.search("three", limit=100)} == set(truth)
    go_on(gallery)
    expect(gallery, truth, "v2")


def rolled_back_after_a_loss(gallery: Gallery, number: int) -> None:
    """Lose it before that write of a worker, then roll back. Expect what the records were, and the writes since."""
    crash(gallery, number)
    with gallery.client() as client:
        truth = write(gallery, client, in_source=True)
    lose(gallery)
    rebuilding(gallery).run()
    roll_back(gallery)
    expect(gallery, truth, "v1")


def lost_in_a_roll_back(gallery: Gallery, number: int) -> None:
    """Lose it before that write of a roll back. Expect that the roll back goes on to its end."""
    crash(gallery, 8)
    with gallery.client() as client:
        truth = write(gallery, client, in_source=True)
    crash(gallery, number, roll_back)
    with gallery.client() as client:
        client.upsert([{"id": 7, "item": "seven", "n": 9}, {"id": 12, "item": "dozen", "n": 9}])
        client.upsert([{"id": 101, "item": "hundred and one", "n": 9}])
        client.delete([8, 100])
    since = {7: ("seven", 9), 12: ("dozen", 9), 101: ("hundred and one", 9)}
    gallery.source.of |= {id: text for id, (text, _) in since.items()}
    truth = {id: value for id, value in (truth | since).items() if id not in (8, 100)}
    lose(gallery)
    rebuilding(gallery).run()
    back = gallery.registry.active_upgrade(gallery.upgrade.gallery_id)
    assert back is not None
    assert back.undoes == gallery.upgrade.id
    assert {int(row.record) for row in gallery.registry.written(back.id)} <= {3, 5, 7, 12, 16, 25, 27, 37, 38, 101}
    roll_back(gallery)
    expect(gallery, truth, "v1")
