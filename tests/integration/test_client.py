"""Answers of a client to odd arguments, at odd moments, and to failures of other parts, one test each."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import text as statement

from rmvdb import errors
from rmvdb.items.objects import load_object
from rmvdb.protocols import always
from rmvdb.registry.mark import is_mark
from rmvdb.serving.client import Client
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.types import Leg, Metric, Record
from tests.support.inprocess import DIMS, Gallery, TextEmbedder, drive, make
from tests.support.spawned import run_spawned
from tests.support.waiting import wait_until


@pytest.fixture(params=[False, True], ids=["one collection", "two collections"])
def gallery(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Gallery]:
    """Eight texts, before an upgrade and during one."""
    made = make(tmp_path, records=8, deployed=request.param)
    yield made
    made.registry.close()


def application(gallery: Gallery, load: Any, import_embedder: Any = lambda _: None) -> Client:
    """Return a client in a process of its own, where models are loaded like that."""
    loaded_models = LoadedModels(
        load_embedder=load,
        load_chain=lambda version: Chain(embedder=version, dim=DIMS[version]),
        load_artifact=lambda _: b"",
        import_embedder=import_embedder,
    )
    return Client("texts", registry=gallery.registry, store=gallery.store, loaded_models=loaded_models, engine_timeout=1.0)


def announce(gallery: Gallery) -> None:
    """Announce a plan of both collections, for which clients must load v2."""
    legs = [Leg(collection=f"texts_{name}", model=name, metric=Metric.COSINE, embedder=name) for name in ("v2", "v1")]
    gallery.registry.announce("texts", legs, gallery.times)


# --- what others write meanwhile ---------------------------------------------------------------------------------------


def test_a_deletion_by_filter_leaves_what_another_client_has_just_changed(gallery: Gallery) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def before(call: str, collection: str) -> None:
        if call == "upsert" and threading.current_thread().name == "writer":
            writing.set()
            go_on.wait(60.0)

    with gallery.client() as one, gallery.client() as other:
        other.upsert([{"id": 3, "item": "t3", "colour": "dog"}, {"id": 4, "item": "t4", "colour": "dog"}])
        gallery.store.before = before
        changed = {"id": 3, "item": "kitty", "colour": "cat"}
        writer = threading.Thread(target=other.upsert, args=([changed],), name="writer")
        writer.start()
        assert writing.wait(60.0)
        threading.Timer(0.5, go_on.set).start()
        assert one.delete(filter='colour == "dog"') == 1
        writer.join()
        assert [record.fields["colour"] for record in one.get(3)] == ["cat"]
        assert one.get(4) == []
    if len(gallery.registry.plan("texts").legs) > 1:  # what the upgrade knows of the records must be their last writes
        assert gallery.registry.last_done(gallery.upgrade.id, [3, 4]) == {"3": "upsert", "4": "delete"}


def test_pages_that_do_not_advance_end_in_an_error(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = gallery.store.scan
    monkeypatch.setattr(gallery.store, "scan", lambda *args, after=None, **options: scan(*args, **options))
    with gallery.client() as client, pytest.raises(errors.EngineError, match="A page after the id 4 of 'texts' ended at 4"):
        list(client._reader.pages("", (), page=4))


@pytest.mark.parametrize("filter", [None, "", " ", "\n"])
def test_a_deletion_by_an_empty_filter_is_refused(gallery: Gallery, filter: str | None) -> None:
    with gallery.client() as client:
        with pytest.raises(errors.UsageError, match="give one of them"):
            client.delete(filter=filter)
        assert client.count() == 8


def test_a_query_gives_what_matches_only(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    held = gallery.store._collections["texts_v1"]
    real = held.get

    def torn(*args: Any, **options: Any) -> list[Record]:
        monkeypatch.undo()
        other.upsert([{"id": 3, "item": "t3", "n": 1}])
        return real(*args, **options)

    with gallery.client() as client, gallery.client() as other:
        monkeypatch.setattr(held, "get", torn)
        assert {record.fields["n"] for record in client.query("n == 0")} == {0}


# --- arguments ----------------------------------------------------------------------------------------------------------


def test_records_and_ids_may_come_from_an_iterator_and_an_id_from_numpy(gallery: Gallery) -> None:
    with gallery.client() as client:
        assert client.upsert({"id": id, "item": f"t{id}"} for id in range(20, 25)) == 5
        assert client.count() == 13
        assert [record.id for record in client.get(np.int64(20))] == [20]  # type: ignore[arg-type]
        assert client.delete(iter([20, 21])) == 2
        assert client.delete(np.int64(22)) == 1  # type: ignore[arg-type]
        assert client.count() == 10


def test_a_negative_limit_or_offset_of_a_query_is_refused(gallery: Gallery) -> None:
    with gallery.client() as client:
        for wrong in ({"limit": -1}, {"limit": 5, "offset": -3}):
            with pytest.raises(errors.UsageError, match="at least 0"):
                client.query(**wrong)  # type: ignore[arg-type]
        assert client.query(limit=0) == []


@pytest.mark.parametrize("vector", [np.full(DIMS["v1"], np.nan), np.full(DIMS["v1"], np.inf), [1.0, [2.0]]])
def test_a_value_that_is_not_a_vector_is_refused(planned: Gallery, vector: Any) -> None:
    with planned.client() as client, pytest.raises(errors.Mismatch, match=r"finite|numbers"):
        client.search(vector=vector, model="v1")


# --- one that is closed, or another process's ---------------------------------------------------------------------------


def test_a_client_that_is_closed_says_so_even_in_mid_search(gallery: Gallery) -> None:
    client = gallery.client()
    searching, go_on = threading.Event(), threading.Event()

    def before(call: str, collection: str) -> None:
        searching.set()
        go_on.wait(60.0)

    told = list[Exception]()

    def search() -> None:
        try:
            while True:
                client.search("t3", limit=1)
        except Exception as exc:  # noqa: BLE001 (whatever it is)
            told.append(exc)

    gallery.store.before = before
    thread = threading.Thread(target=search)
    thread.start()
    assert searching.wait(60.0)
    threading.Timer(0.3, go_on.set).start()
    client.close()
    thread.join()
    for call in (
        lambda: client.search("t3"),
        lambda: client.get(3),
        lambda: client.upsert([{"id": 3, "item": "t3"}]),
        client.count,
    ):
        try:
            call()
        except Exception as exc:  # noqa: BLE001 (whatever it is)
            told.append(exc)
    assert [type(each) for each in told] == [errors.UsageError] * 5
    assert all("is closed" in str(each) for each in told)
    client.close()


def _fork(folder: Path, deployed: bool) -> None:
    gallery = make(folder, records=8, deployed=deployed)
    with gallery.client() as client:
        client._current_plan._stop.set()
        client._current_plan._wake.set()
        client._current_plan._thread.join()  # no heartbeat of this client comes meanwhile
        client._current_plan._stop.clear()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(60)
            words = ""
            try:
                client.search("t3")
            except errors.UsageError as exc:
                words = str(exc)
            client.close()
            os.write(writing, words.encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        assert "connect in each process" in os.read(reading, 1000).decode()
        with gallery.registry.engine.begin() as connection:
            assert connection.scalars(statement("SELECT id FROM clients")).all() == [client.name]
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]


@pytest.mark.parametrize("deployed", [False, True], ids=["one collection", "two collections"])
def test_a_client_does_not_outlive_a_fork(tmp_path: Path, deployed: bool) -> None:
    run_spawned(_fork, tmp_path, deployed, seconds=120)


# --- models that do not load --------------------------------------------------------------------------------------------


@pytest.fixture
def planned(tmp_path: Path) -> Iterator[Gallery]:
    """Eight texts in the old collection, which is served alone."""
    made = make(tmp_path, records=8, deployed=False)
    yield made
    made.registry.close()


@pytest.mark.parametrize("failure", [RuntimeError("no weights-\udce9.pt"), RuntimeError("no \0"), SystemExit("run download.sh")])
def test_any_error_of_a_model_that_does_not_load_is_reported_and_searches_go_on(planned: Gallery, failure: BaseException) -> None:
    def load(version: str) -> TextEmbedder:
        if version == "v2":
            raise failure
        return TextEmbedder(version)

    with application(planned, load) as client:
        announce(planned)

        def told() -> bool:
            assert [hit.id for hit in client.search("t3", limit=1)] == [3]
            return any(type(failure).__name__ in seen.trouble for seen in planned.registry.clients(planned.upgrade.gallery_id))

        wait_until(told)
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]


def test_a_model_that_does_not_load_is_tried_again_ever_more_seldom(planned: Gallery) -> None:
    tries = list[float]()

    def load(version: str) -> TextEmbedder:
        if version == "v2":
            tries.append(time.monotonic())
            raise RuntimeError("no room")
        return TextEmbedder(version)

    with application(planned, load):
        announce(planned)
        wait_until(lambda: len(tries) >= 3, seconds=30)
    assert tries[1] - tries[0] >= 1  # a heartbeat comes several times a second
    assert tries[2] - tries[1] >= 2


def test_a_module_that_searches_while_it_is_imported_is_not_waited_for(planned: Gallery, tmp_path: Path) -> None:
    """The next model's embedder is in that module, too, and is loaded by another thread just then."""
    text = "import holder, time\nfrom tests.support.inprocess import TextEmbedder\n"
    text += "v1 = lambda: TextEmbedder('v1')\nv2 = lambda: TextEmbedder('v2')\n"
    text += "client = holder.connect()\ntime.sleep(0.5)\nfound = client.search('t3', limit=1)\n"
    (tmp_path / "warming.py").write_text(text)
    holder = ModuleType("holder")

    def spec(version: str) -> Any:
        return load_object(f"warming:{version}")

    holder.connect = lambda: application(planned, lambda version: spec(version)(), spec)  # type: ignore[attr-defined]
    announce(planned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "holder", holder)
        patch.syspath_prepend(str(tmp_path))
        thread = threading.Thread(target=importlib.import_module, args=("warming",), daemon=True)
        thread.start()
        thread.join(60.0)
        assert not thread.is_alive()
        warming = sys.modules.pop("warming")
    assert [hit.id for hit in warming.found] == [3]
    warming.client.close()


# --- what the engine refuses -------------------------------------------------------------------------------------------


def refusing(gallery: Gallery, refusal: Exception, *, call: str, at: int, bad: tuple[int, ...] = ()) -> None:
    """Let the engine refuse that call of the store, from 1, once it was sent; of an upsert with `bad` the others are written."""
    real, calls = getattr(gallery.store, call), iter(range(1, 100))

    def refuse(collection: str, what: Any, *, permit: Any = always, **options: Any) -> None:
        if is_mark(collection) or next(calls) != at:
            real(collection, what, permit=permit, **options)
            return
        permit()
        if bad:
            real(collection, [record for record in what if record.id not in bad])
        raise refusal

    setattr(gallery.store, call, refuse)


def never_writing(gallery: Gallery, refusal: Exception, bad: set[int]) -> None:
    """Let the store refuse each upsert that has one of these records, before anything is written."""
    real = gallery.store.upsert

    def upsert(collection: str, records: Sequence[Record], **options: Any) -> None:
        if not is_mark(collection) and bad.intersection(record.id for record in records):
            raise refusal
        real(collection, records, **options)

    gallery.store.upsert = upsert  # type: ignore[method-assign]


def open_writes(gallery: Gallery) -> int:
    return len(gallery.registry.open_writes(gallery.registry.gallery("texts").id))


@pytest.mark.parametrize("call", ["upsert", "delete"])
def test_a_write_that_the_engine_refuses_keeps_nothing_waiting(gallery: Gallery, call: str) -> None:
    refusing(gallery, errors.Refused("no"), call=call, at=1)
    with gallery.client() as client:
        write = {"upsert": lambda: client.upsert([{"id": 3, "item": "cat"}]), "delete": lambda: client.delete(3)}[call]
        with pytest.raises(errors.Refused):
            write()
        assert open_writes(gallery) == 0
        began = time.monotonic()
        write()
        assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("failure", [errors.EngineError("?"), errors.EngineUnavailable("?"), errors.EngineKilled("?")])
def test_a_write_of_unknown_outcome_stays_announced(gallery: Gallery, failure: Exception) -> None:
    refusing(gallery, failure, call="upsert", at=1)
    with gallery.client() as client, pytest.raises(type(failure)):
        client.upsert([{"id": 3, "item": "cat"}])
    assert open_writes(gallery) == 1


def test_a_write_that_new_takes_and_old_refuses_stays_announced(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=8)
    refusing(gallery, errors.Refused("no"), call="upsert", at=2)
    with gallery.client() as client, pytest.raises(errors.Refused):
        client.upsert([{"id": 3, "item": "cat"}])
    assert open_writes(gallery) == 1
    gallery.registry.close()


def test_a_write_that_new_takes_and_a_reading_of_old_refuses_stays_announced(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=8)
    real = gallery.store.get

    def get(collection: str, *args: Any, **options: Any) -> list[Record]:
        if collection == "texts_v1":
            raise errors.Refused("no right to read")
        return real(collection, *args, **options)

    gallery.store.get = get  # type: ignore[method-assign]
    with gallery.client() as client, pytest.raises(errors.Refused):
        client.upsert([{"id": 3, "item": "cat"}])
    assert open_writes(gallery) == 1
    gallery.registry.close()


def test_records_that_end_the_engine_keep_no_other_from_being_written_in_every_collection(gallery: Gallery) -> None:
    refusing(gallery, errors.EngineKilled("ended", ids=[3]), call="upsert", at=1, bad=(3,))
    with gallery.client() as client:
        with pytest.raises(errors.EngineKilled) as refused:
            client.upsert([{"id": id, "item": "cat", "n": 1} for id in (2, 3, 4)])
        assert refused.value.ids == (3,)
        assert {record.id: record.fields["n"] for record in client.get([2, 3, 4])} == {2: 1, 3: 0, 4: 1}
        assert {each.id: each.fields["n"] for each in gallery.store.get("texts_v1", [2, 3, 4])} == {2: 1, 3: 0, 4: 1}
        assert open_writes(gallery) == 0
        assert client.upsert([{"id": 3, "item": "dog"}]) == 1


def test_records_that_the_engine_cannot_write_are_quarantined_and_the_others_moved(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=20)
    never_writing(gallery, errors.Unwritable("the id is odd"), {3, 4, 9})
    drive(gallery, width=1)
    assert set(gallery.held()["old"]) == {3, 4, 9}
    assert set(gallery.held()["new"]) == set(range(1, 21)) - {3, 4, 9}
    assert {row.reason for row in gallery.registry.quarantined(gallery.upgrade.id)} == {"the id is odd"}
    gallery.registry.close()


def test_a_collection_that_takes_no_record_stops_the_backfill_and_quarantines_none(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=20)
    never_writing(gallery, errors.Unwritable("it needs another field"), set(range(1, 21)))
    with pytest.raises(errors.Unwritable, match="it needs another field"):
        drive(gallery, width=1)
    assert len(gallery.held()["old"]) == 20
    assert gallery.registry.quarantined(gallery.upgrade.id) == []
    gallery.registry.close()


def test_a_record_that_ends_the_engine_is_quarantined_alone(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=20)
    refusing(gallery, errors.EngineKilled("ended", ids=[3]), call="upsert", at=1, bad=(3,))
    drive(gallery, width=1)
    assert set(gallery.held()["old"]) == {3}
    assert set(gallery.held()["new"]) == set(range(1, 21)) - {3}
    assert [row.reason for row in gallery.registry.quarantined(gallery.upgrade.id)] == ["ended"]
    gallery.registry.close()


def test_each_refusal_of_a_copied_registry_is_an_error_of_its_own(gallery: Gallery) -> None:
    """The traceback of one that is raised again and again would keep the items of every search."""
    with gallery.client() as client:
        client._current_plan._not_owner = errors.NotOwner("it has gone back")
        refused = []
        for _ in range(2):
            with pytest.raises(errors.NotOwner, match="it has gone back") as told:
                client.search("t1")
            refused.append(told.value)
    assert refused[0] is not refused[1]


def test_a_bad_item_is_named_by_its_record_with_the_number_of_those_that_are_written(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmvdb.serving.writes.WRITE_BATCH", 3)
    records = [{"id": id, "item": "broken" if id == 14 else f"t{id}"} for id in range(10, 16)]
    with gallery.client() as client:
        with pytest.raises(errors.ItemError, match=r"^Record 14 cannot be written: ValueError: broken; 3 records before it are"):
            client.upsert(records)
        assert {record.id for record in client.get(range(10, 16))} == {10, 11, 12}
        with pytest.raises(errors.ItemError, match=r"^Record 14 cannot be written: ValueError: broken$"):
            client.upsert(records[4:])


@pytest.mark.parametrize("vector", [[10**400] * 6, "a tensor that needs gradients"], ids=["too large", "tensor"])
def test_a_vector_that_is_no_row_of_numbers_is_refused(gallery: Gallery, vector: Any) -> None:
    if isinstance(vector, str):
        vector = torch.ones(6, requires_grad=True)
    with gallery.client() as client, pytest.raises(errors.Mismatch, match="vector= takes numbers"):
        client.search(vector=vector, model="v1")
