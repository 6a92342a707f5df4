"""A client that writes is killed, suspended or late.."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from rmvdb import errors
from rmvdb.registry.codec import key
from rmvdb.serving.client import Client
from rmvdb.types import Id
from tests.support.faults import copied, drive, dying, killed, once, roll_back
from tests.support.inprocess import Gallery, vector


@pytest.mark.usefixtures("short")
def test_a_write_suspended_past_its_deadline_is_not_reported_as_done(gallery: Gallery) -> None:
    def suspended() -> None:
        time.sleep(6.1)
        drive(gallery)  # copies over what was written, which counts as never made

    with gallery.client() as client:
        gallery.store.after = once("upsert", gallery.task.new[0], suspended)
        with pytest.raises(errors.EngineError, match=r"took longer than 6 s; repeat the write"):
            client.upsert([{"id": 3, "item": "newer", "n": 1}])
    gallery.expect_moved()


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("case", ["a new record", "a record in both", "a record that has moved"])
def test_a_client_killed_in_a_write_does_not_keep_an_upgrade_from_its_end(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    copied(gallery)
    if case == "a record in both":
        gallery.store.looked = once("get", gallery.task.old[0], killed)
    elif case == "a record that has moved":
        drive(gallery)
    with gallery.client() as client, dying(monkeypatch, gallery, "close_intents"):
        if case == "a record that has moved":
            client.delete([3])
        else:
            client.upsert([{"id": 99 if case == "a new record" else 3, "item": "newer", "n": 1}])
    time.sleep(6.1)
    drive(gallery)
    assert gallery.verify().examples == []


def test_a_client_that_has_not_heard_of_an_epoch_sees_what_another_writes_under_it(planned: Gallery) -> None:
    with planned.client() as other:
        planned.conductor().deploy(planned.upgrade)
        with planned.client() as writer:
            writer.upsert([{"id": 99, "item": "t99", "n": 1}])
            assert [hit.id for hit in other.search("t99", limit=1, consistency="Strong")] == [99]


def test_a_search_is_as_strong_as_it_or_its_client_says(planned: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = planned.store.search

    def search(*words: object, strong: bool, **options: object) -> object:
        asked.append(strong)
        return real(*words, strong=strong, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(planned.store, "search", search)
    parts = {"registry": planned.registry, "store": planned.store, "loaded_models": planned.loaded_models}
    with planned.client() as usual, Client("texts", consistency="Strong", **parts) as strong:
        for client in (usual, strong):
            client.search("t1")
            client.search("t1", consistency="Bounded")
            client.search("t1", consistency="Strong")
        with pytest.raises(errors.UsageError, match="'strong'"):
            usual.search("t1", consistency="strong")  # type: ignore[call-overload]
    assert asked == [False, False, True, True, False, True]


@pytest.mark.usefixtures("short")
def test_a_half_made_write_does_not_mix_with_the_archive_in_a_roll_back(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(gallery)
    gallery.source.of[3] = "newer"
    with gallery.client() as client, dying(monkeypatch, gallery, "close_intents"):
        client.upsert([{"id": 3, "item": "newer", "n": 1}])
    time.sleep(6.1)
    roll_back(gallery)
    (record,) = gallery.store.get(gallery.task.old[0], [3], vector=True)
    assert record.fields == {"n": 1}
    assert np.allclose(record.vector, vector("v1", "newer"), atol=1e-6)  # type: ignore[arg-type]


def test_a_write_that_is_refused_before_it_left_delays_no_other(gallery: Gallery) -> None:
    with gallery.client() as one, gallery.client() as two:
        with pytest.raises(errors.RmvdbError):
            one.upsert([{"id": "3", "item": "x"}])  # a text where ids are numbers
        assert not gallery.registry.open_writes(gallery.upgrade.gallery_id)
        began = time.monotonic()
        two.upsert([{"id": 3, "item": "y", "n": 2}])
        assert time.monotonic() - began < 25.0  # thirty, if it did


def test_a_write_does_not_wait_without_end_for_its_turn(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmvdb.serving.announced_writes.WRITE_WAITS", 0.5)
    with gallery.client() as client, gallery.registry.engine.begin() as connection:
        connection.execute(text("UPDATE galleries SET rebuilding = 1"))
        connection.commit()
        with pytest.raises(errors.EngineError, match=r"have waited for over 0\.5 s .* repeat the write"):
            client.upsert([{"id": 3, "item": "newer", "n": 1}])


def test_a_write_that_waited_past_its_deadline_is_not_made(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off from the database meanwhile; another one has begun since, which could not know of it."""
    monkeypatch.setattr("rmvdb.serving.announced_writes.WRITE_LASTS", 3.0)
    real, asked = gallery.registry.blocked, list[bool]()

    def blocked(*args: Any) -> bool:
        if not asked:
            asked.append(True)
            time.sleep(3.5)
            with gallery.client() as other:
                other.upsert([{"id": 3, "item": "other", "n": 2}])
            return True
        return real(*args)

    with gallery.client() as client:
        monkeypatch.setattr(gallery.registry, "blocked", blocked)
        with pytest.raises(errors.EngineError, match="took longer than 3 s; repeat the write"):
            client.upsert([{"id": 3, "item": "newer", "n": 1}])
        assert client.get([3])[0].fields == {"n": 2}


def test_records_to_delete_are_chosen_once_no_other_writer_is_at_them(gallery: Gallery) -> None:
    begun = threading.Event()

    def slowly(call: str, _: str) -> None:
        if call == "upsert" and not begun.is_set():
            begun.set()
            time.sleep(0.5)

    def unwritten(ids: Sequence[Id]) -> list[Id]:
        written = gallery.registry.last_done(gallery.upgrade.id, ids)
        return [id for id in ids if key(id) not in written]

    with gallery.client() as writer, gallery.client() as client, ThreadPoolExecutor(1) as pool:
        gallery.store.before = slowly
        writing = pool.submit(writer.upsert, [{"id": 7, "item": "newer", "n": 1}])
        assert begun.wait(10.0)
        assert client.delete_those([7, 8], unwritten) == [8]
        writing.result()
        assert [record.id for record in client.get([7, 8])] == [7]
        assert client.delete_those([5, 5], lambda _: []) == []
        assert not gallery.registry.announced(gallery.upgrade.id, [5])
