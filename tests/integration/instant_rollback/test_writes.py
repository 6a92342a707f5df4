"""Writes of clients and other programs into a kept original during an upgrade."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rmvdb import errors
from rmvdb.learning.method import Method
from rmvdb.timing import WRITE_LASTS
from rmvdb.types import Id, Phase, Record
from rmvdb.upgrade import clean_up
from tests.support.inprocess import Gallery, TextEmbedder, make, vector
from tests.support.kept_original import (
    ORIGINAL,
    back,
    begin,
    die_in_the_copy,
    expect_holds,
    expect_original,
    go_on,
    put,
    without_v1,
)
from tests.support.waiting import grow_old


def test_an_insertion_under_way_or_cut_off_does_not_prevent_a_clean_up(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    row, half, rest = go_on(gallery, begin(gallery)), threading.Event(), threading.Event()

    def after(call: str, collection: str) -> None:
        if collection == ORIGINAL and threading.current_thread() is not writer:
            raise KeyboardInterrupt
        if collection == ORIGINAL:
            half.set()
            rest.wait()

    def under_way(*_: object) -> None:
        writer.start()
        half.wait()
        threading.Timer(1.0, rest.set).start()

    def insert() -> None:
        with gallery.client() as client:
            put(gallery, client, 78, "under way")

    writer = threading.Thread(target=insert)
    gallery.store.after = after
    with gallery.client() as client, pytest.raises(KeyboardInterrupt):
        client.upsert([{"id": 77, "item": "cut off", "n": 9}])
    grow_old(gallery.registry, seconds=WRITE_LASTS - 5)
    monkeypatch.setattr(clean_up, "_wait_for_older_searches", under_way)
    gallery.conductor().clean_up(row)
    writer.join()
    expect_holds(gallery, row.new_collection, "v2")


@pytest.mark.parametrize(
    ("kind", "id", "until"), [("upsert", 2, 0.0), ("delete", 2, 0.0), ("upsert", 2, 1.0), ("delete", 2, 1.0), ("upsert", 77, 1.0)]
)
def test_a_client_that_dies_between_the_mirror_and_the_other_collections_leaves_no_difference(
    gallery: Gallery, kind: str, id: int, until: float
) -> None:
    """Its write is made nowhere or everywhere, before the cut-over and after a roll back alike."""
    row = go_on(gallery, begin(gallery, until=0.5))

    def die(call: str, collection: str) -> None:
        if collection == ORIGINAL:
            raise KeyboardInterrupt

    gallery.store.after = die
    with gallery.client() as client, pytest.raises(KeyboardInterrupt):
        client.upsert([{"id": id, "item": "cut off", "n": 9}]) if kind == "upsert" else client.delete(id)
    grow_old(gallery.registry, seconds=WRITE_LASTS + 1)
    gallery.store.after = lambda call, collection: None
    with gallery.client() as client:
        assert [record.fields["n"] for record in client.get([id])] == ([0] if id == 2 else [])
    if until == 1.0:
        gallery.source.of = {each: text for each, text in gallery.source.of.items() if (each, kind) != (id, "delete")}
        if kind == "upsert":
            gallery.source.of[id] = "cut off"
        gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
        row = go_on(gallery, row)
        assert row.phase == Phase.CUT_OVER
        assert gallery.records(row.new_collection).keys() == gallery.records(ORIGINAL).keys()
    back(gallery, row)
    with gallery.client() as client:
        assert [record.fields["n"] for record in client.get([id])] == ([9] if kind == "upsert" else [])


def test_clients_that_die_while_the_copy_is_made_leave_no_difference(gallery: Gallery) -> None:
    """They wrote the copy, which had been compared, and not the original: nowhere, before a roll back and after it."""
    row, conductor = begin(gallery), gallery.conductor()

    def die(call: str, collection: str) -> None:
        if collection == row.old_collections[0]:
            raise KeyboardInterrupt

    def rest_until_expired(words: str) -> None:
        if "until every search would see it" in words:
            gallery.store.after = die
            with gallery.client() as client:
                for id in (2, 77):
                    with pytest.raises(KeyboardInterrupt):
                        client.upsert([{"id": id, "item": "cut off", "n": 9}])
                with pytest.raises(KeyboardInterrupt):
                    client.delete(3)
            grow_old(gallery.registry, seconds=WRITE_LASTS + 1)
            gallery.store.after = lambda call, collection: None

    conductor.say = rest_until_expired
    conductor.deploy(row)
    assert gallery.records(*row.old_collections).keys() == gallery.source.of.keys()
    go_on(gallery, row)
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)
    with gallery.client() as client:
        assert [(record.id, record.fields["n"]) for record in client.get([2, 3, 77])] == [(2, 0), (3, 0)]


def test_a_record_that_a_client_wrote_before_the_copy_was_finished_is_left_alone(gallery: Gallery) -> None:
    """Another had died at the same record while the copy was made, and so it is looked at again once the copy is served."""
    row, conductor = begin(gallery), gallery.conductor()
    real = conductor.registry.expired_writes

    def expired_writes(name: str) -> list[Id]:
        with gallery.client() as client:
            put(gallery, client, 2, "written since")
        return [2, *real(name)]

    conductor.registry.expired_writes = expired_writes  # type: ignore[method-assign]
    conductor.deploy(row)
    conductor.registry.expired_writes = real  # type: ignore[method-assign]
    go_on(gallery, row)
    expect_holds(gallery, row.new_collection, "v2")
    expect_original(gallery)


def test_a_record_that_a_client_deleted_stays_out_though_another_program_put_it_back(gallery: Gallery) -> None:
    row = go_on(gallery, begin(gallery, until=0.5))
    text = gallery.source.of.pop(2)
    with gallery.client() as client:
        client.delete(2)
    gallery.store.upsert(ORIGINAL, [Record(id=2, vector=vector("v1", text), fields={"n": 2})])
    gallery.registry.set_upgrade(row.id, plan=replace(row.plan, until=1.0, cutover=True))
    row = go_on(gallery, row)
    assert row.phase == Phase.CUT_OVER
    expect_holds(gallery, row.new_collection, "v2")
    with pytest.raises(errors.WrongPhase, match="came into"):
        gallery.conductor().clean_up(row)


@pytest.mark.parametrize("there", [True, False])
def test_the_original_is_written_by_its_own_model_where_there_is_one_else_through_psi(tmp_path: Path, there: bool) -> None:
    gallery = make(tmp_path, records=200, deployed=False)
    assert gallery.conductor().roll_back(gallery.upgrade) is None
    gallery.loaded_models._load_embedder = TextEmbedder if there else without_v1
    before = gallery.registry.plan("texts").legs
    given_up = begin(gallery, method=Method.RQT)
    die_in_the_copy(gallery, given_up)
    assert gallery.conductor().roll_back(gallery.registry.upgrade(given_up.id)) is None
    assert gallery.registry.plan("texts").legs == before
    row = go_on(gallery, begin(gallery, until=0.5, method=Method.RQT))
    psi = gallery.registry.plan("texts").legs[-1].transforms
    assert len(psi) == 1
    with gallery.client() as client:
        put(gallery, client, 7, "written since")
    [written] = gallery.store.get(ORIGINAL, [7], vector=True)
    mapped = gallery.loaded_models.apply(psi, vector("v2", "written since")[None])[0]
    own = vector("v1", "written since")
    assert np.allclose(written.vector, own if there else mapped, atol=1e-6)  # type: ignore[arg-type]
    back(gallery, row)
    with gallery.client() as client:
        assert client.plan.embedders == (("v1",) if there else ("v2",))
        assert client.search("written since", limit=1)[0].id == 7
    gallery.registry.close()


def test_nothing_is_dropped_before_searches_of_the_plan_before_have_ended(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, rested = go_on(gallery, begin(gallery)), list[float]()
    drop, cut_over = gallery.store.drop, gallery.registry.gallery("texts").served_since
    assert cut_over is not None  # from then on no search begins there

    def look(collection: str) -> None:
        if collection in (ORIGINAL, *row.old_collections):
            rested.append(gallery.registry.now() - cut_over - gallery.registry.plan("texts").grace)
        drop(collection)

    monkeypatch.setattr(gallery.store, "drop", look)
    gallery.conductor().clean_up(row)
    assert rested
    assert min(rested) >= 0.0
