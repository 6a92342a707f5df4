"""Every write of a worker or a conductor asks first whether it may still write: its lease or its deadline may be over."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from rmvdb import errors
from rmvdb.protocols import always
from rmvdb.serving import announced_writes
from rmvdb.timing import WRITE_LASTS, uptime
from rmvdb.types import BatchState, Record
from rmvdb.upgrade import keep_original
from tests.support.faults import claimed, copied, remove
from tests.support.inprocess import Gallery, make, vector
from tests.support.kept_original import ORIGINAL, begin, foreign


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, none of them moved."""
    made = make(tmp_path)
    yield made
    made.registry.close()


def over() -> NoReturn:
    raise errors.LeaseLost("over")


def test_a_worker_whose_lease_is_over_copies_nothing(gallery: Gallery) -> None:
    with pytest.raises(errors.LeaseLost):
        gallery.backfill.copy(gallery.task, claimed(gallery), over)
    assert gallery.held()["new"] == {}


@pytest.mark.parametrize("deleted", [False, True], ids=["from the old collection", "from the new one"])
def test_a_worker_whose_lease_is_over_removes_nothing(gallery: Gallery, deleted: bool) -> None:
    copied(gallery)
    batch = claimed(gallery)
    assert batch.state == BatchState.COPIED
    if deleted:
        remove(gallery, next(iter(gallery.held()["new"])))
    before = {name: records.keys() for name, records in gallery.held().items()}
    with pytest.raises(errors.LeaseLost):
        gallery.backfill.retire(gallery.task, batch, over)
    assert {name: records.keys() for name, records in gallery.held().items()} == before


def test_no_record_leaves_a_collection_without_consent(gallery: Gallery) -> None:
    copied(gallery)
    batch, before = claimed(gallery), gallery.held()["old"].keys()
    with pytest.raises(errors.NeedsConsent, match="was not made by rmvdb"):
        gallery.backfill.retire(replace(gallery.task, removal_allowed=False), batch, always)
    assert gallery.held()["old"].keys() == before


@pytest.mark.parametrize("what", ["copy", "take in", "take out"])
def test_a_conductor_whose_deadline_is_over_writes_nothing_beside_an_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    gallery = make(tmp_path, deployed=False)
    gallery.registry.set_upgrade(gallery.upgrade.id, phase="ended")
    row = begin(gallery)
    if what != "copy":
        gallery.conductor().deploy(row)
        row = gallery.registry.upgrade(row.id)
        foreign(gallery, 60) if what == "take in" else gallery.store.delete(ORIGINAL, [3])
    else:
        copy = gallery.conductor()
        copy.report = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # after the first page
        with pytest.raises(KeyboardInterrupt):
            copy.deploy(row)
        gallery.store.upsert(ORIGINAL, [Record(id=7, vector=vector("v1", "t7"), fields={"n": 5})])
    beside = [name for name in keep_original.beside(row) if gallery.store.exists(name)]
    before = {name: gallery.records(name) for name in beside}
    blocked = gallery.registry.blocked

    def late(*args: object, **options: object) -> bool:  # it stood still from here on
        monkeypatch.setattr(announced_writes, "uptime", lambda: uptime() + WRITE_LASTS)
        return blocked(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(gallery.registry, "blocked", late)
    mirror = keep_original.mirror(gallery.conductor(), row)
    act = (
        functools.partial(mirror.finish, row.old_collections[0], [7])
        if what == "copy"
        else functools.partial(mirror.agree, beside)
    )
    with pytest.raises(errors.EngineError, match="took longer than 30 s; repeat the write"):
        act()
    after = {name: gallery.records(name) for name in beside}
    assert {name: {id: each.fields for id, each in records.items()} for name, records in after.items()} == {
        name: {id: each.fields for id, each in records.items()} for name, records in before.items()
    }
    gallery.registry.close()
