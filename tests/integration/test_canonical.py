"""Odd ids, fields and vectors at the door of a client or of a batch, each in one test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rmvdb import errors
from rmvdb.types import Item, Phase, Record, Vectors
from tests.support.inprocess import DIMS, Gallery, TextEmbedder, drive, make, vector


class OddEmbedder(TextEmbedder):
    """Nothing at all for an item "zero", and too much for an item "huge"."""

    def embed(self, items: Sequence[Item]) -> Vectors:
        """(n, dim)"""
        scale = {"zero": 0.0, "huge": 1e30}
        return super().embed(items) * np.array([[scale.get(str(item), 1.0)] for item in items], np.float32)


@pytest.fixture(params=[False, True], ids=["one collection", "two collections"])
def gallery(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gallery]:
    """Twenty texts, before an upgrade and during one, whose models give odd vectors for some items."""
    made = make(tmp_path, records=20, deployed=request.param)
    monkeypatch.setattr(made.loaded_models, "_load_embedder", OddEmbedder)
    monkeypatch.setattr(made.loaded_models, "_loaded", {})
    yield made
    made.registry.close()


@pytest.fixture
def upgrading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gallery]:
    """The same, during an upgrade."""
    made = make(tmp_path, records=20)
    monkeypatch.setattr(made.loaded_models, "_load_embedder", OddEmbedder)
    monkeypatch.setattr(made.loaded_models, "_loaded", {})
    yield made
    made.registry.close()


def held(gallery: Gallery) -> list[Any]:
    names = [each for each in ("texts_v1", "texts_v2") if gallery.store.exists(each)]
    records = [record for name in names for record in gallery.records(name).values()]
    return [(each.id, dict(each.fields), None if each.vector is None else each.vector.tolist()) for each in records]


# --- ids ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", [torch.tensor(5), np.int64(5), np.array(5)], ids=repr)
def test_an_id_of_torch_or_numpy_is_written_read_and_deleted_as_the_number_that_it_is(gallery: Gallery, id: Any) -> None:
    with gallery.client() as client:
        assert client.upsert([{"id": id, "item": "other", "n": 1}, {"id": 5, "item": "t5", "n": 2}]) == 1
        assert [(each.id, type(each.id), each.fields) for each in client.get(id)] == [(5, int, {"n": 2})]
        gallery.source.of[5] = "t5"
        if len(client.plan.legs) > 1:
            drive(gallery)
            assert gallery.verify().examples == []
        assert client.delete(id) == 1
        assert client.get(5) == []
        assert client.count() == 19


def test_several_ids_come_in_whatever_holds_several(gallery: Gallery) -> None:
    with gallery.client() as client:
        for ids in (
            torch.tensor([1, 2]),
            np.array([1, 2]),
            (1, 2),
            iter([1, 2]),
            {1: "a", 2: "b"}.keys(),
            [np.int8(1), torch.tensor(2)],
        ):
            assert [each.id for each in client.get(ids)] == [1, 2]  # type: ignore[arg-type]
        assert {each.id for each in client.get({1, 2})} == {1, 2}
        assert client.delete(torch.tensor([1, 2])) == 2  # type: ignore[arg-type]
        assert client.count() == 18


@pytest.mark.parametrize(
    "ids", [b"7", bytearray(b"\x07"), "7", ["7"], 7.0, [7.0], True, [True], [b"7"], np.array([7.0]), {7: 1}], ids=repr
)
def test_a_value_that_is_not_an_id_of_the_gallery_deletes_and_reads_nothing(gallery: Gallery, ids: Any) -> None:
    """If the bytes b"7" are taken apart, they are the number 55."""
    before = held(gallery)
    with gallery.client() as client:
        for call in (client.get, client.delete):
            with pytest.raises(errors.Mismatch, match=r"An id is|has ids of type INT64|Ids come"):
                call(ids)
        if not isinstance(ids, list | dict | np.ndarray):
            with pytest.raises(errors.Mismatch, match=r"has ids of type INT64"):
                client.upsert([{"id": ids, "item": "t1"}])
    assert held(gallery) == before


# --- fields -------------------------------------------------------------------------------------------------------------


def test_of_many_records_none_is_written_where_a_field_of_the_last_cannot_be(gallery: Gallery) -> None:
    before = held(gallery)
    records: list[dict[str, Any]] = [{"id": id, "item": f"t{id}", "n": 1} for id in range(1, 700)]
    with gallery.client() as client:
        for odd, said in (({"n": float("nan")}, "'n' holds nan"), ({"vector": [1.0]}, "has a field 'vector', by which name")):
            with pytest.raises(errors.Unwritable, match=f"Record 700 .*{said}"):
                client.upsert([*records, {"id": 700, "item": "t700", **odd}])
        assert held(gallery) == before
        assert gallery.registry.open_writes(gallery.registry.gallery("texts").id) == set()
        client.upsert([{"id": 1, "item": "t1", "n": np.float32(0.5), "list": (1, np.int8(2))}])  # no one is waited for
        assert client.get(1)[0].fields == {"n": 0.5, "list": [1, 2]}


@pytest.mark.parametrize("records", [5, ["t1"], [{"id": 1}], [{"item": "t1"}], [{}]], ids=repr)
def test_a_value_that_is_not_a_list_of_records_is_refused(gallery: Gallery, records: Any) -> None:
    with gallery.client() as client, pytest.raises(errors.UsageError, match=r"a list of records|needs an id and an item"):
        client.upsert(records)


def test_a_single_record_is_written(gallery: Gallery) -> None:
    with gallery.client() as client:
        assert client.upsert({"id": 1, "item": "t1", "n": 7}) == 1
        assert client.get(1)[0].fields["n"] == 7


def test_one_name_is_one_field_and_a_limit_is_a_number(gallery: Gallery) -> None:
    with gallery.client() as client:
        assert client.search("t1", limit=np.int64(1), output_fields="n")[0].fields == {"n": 0}  # type: ignore[call-overload]
        assert client.get(1, output_fields="n")[0].fields == {"n": 0}
        assert client.query("", limit=np.int64(1), output_fields="n")[0].fields == {"n": 0}  # type: ignore[arg-type]
        for wrong in (
            {"limit": "3"},
            {"limit": True},
            {"limit": 3.0},
            {"offset": "0"},
            {"output_fields": 5},
            {"output_fields": [5]},
        ):
            for call in (lambda **given: client.search("t1", **given), client.query):
                with pytest.raises(errors.UsageError, match=next(iter(wrong))):
                    call(**wrong)


# --- vectors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("item", ["zero", "huge"])
def test_an_item_whose_vector_cannot_be_ranked_is_refused_with_its_id(gallery: Gallery, item: str) -> None:
    before = held(gallery)
    with gallery.client() as client:
        with pytest.raises(errors.Mismatch, match=r"Record 77 cannot be written: its vector for texts_v\d has the length"):
            client.upsert([{"id": 1, "item": "other"}, {"id": 77, "item": item}])
        with pytest.raises(errors.Mismatch, match="The query has a vector that has the length"):
            client.search(item)
        with pytest.raises(errors.Mismatch, match="Query 1 of 2 has a vector that has the length"):
            client.search(["t1", item])
        if len(client.plan.legs) == 1:
            with pytest.raises(errors.Mismatch, match="The query has a vector that has the length 0"):
                client.search(vector=np.zeros(DIMS["v1"]), model="v1")
    assert held(gallery) == before


@pytest.mark.parametrize("item", ["zero", "huge"])
def test_an_item_whose_new_vector_cannot_be_ranked_is_quarantined_and_stays_where_it_is(upgrading: Gallery, item: str) -> None:
    upgrading.source.of[7] = item
    drive(upgrading)
    [aside] = upgrading.registry.quarantined(upgrading.upgrade.id)
    assert aside.record == "7"
    assert aside.reason.startswith("its vector has the length")
    assert set(upgrading.held()["old"]) == {7}
    assert set(upgrading.held()["new"]) == upgrading.source.of.keys() - {7}


def test_a_vector_that_the_head_takes_to_zero_is_quarantined(upgrading: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply_head(version: str, raw: Vectors) -> Vectors:
        return np.where((np.abs(raw - vector("v2", "t7")) < 1e-6).all(axis=1, keepdims=True), np.float32(0), raw)

    monkeypatch.setattr(upgrading.loaded_models, "apply_head", apply_head)
    drive(upgrading)
    [aside] = upgrading.registry.quarantined(upgrading.upgrade.id)
    assert (aside.record, aside.reason) == ("7", "its vector has the length 0, and so no direction that COSINE could compare")
    assert set(upgrading.held()["old"]) == {7}


def test_a_model_that_gives_nothing_for_every_item_is_broken(upgrading: Gallery) -> None:
    upgrading.source.of = dict.fromkeys(upgrading.source.of, "zero")
    with pytest.raises(errors.ModelError, match="The embedder fails for each of 10 items: its vector has the length 0"):
        drive(upgrading)
    assert set(upgrading.held()["old"]) == upgrading.source.of.keys()
    assert upgrading.registry.quarantined(upgrading.upgrade.id) == []


def test_a_vector_that_no_search_finds_is_counted(upgrading: Gallery) -> None:
    drive(upgrading)
    there = upgrading.records("texts_v2")[7]
    upgrading.store.upsert("texts_v2", [replace(there, vector=np.zeros(DIMS["v2"], np.float32))], as_read=True)
    report = upgrading.verify()
    assert report.problems == 1
    assert report.examples == [
        "record 7 has a vector that has the length 0, and so no direction that COSINE could compare, so that no search finds it; "
        "write it again"
    ]


# --- the way back -------------------------------------------------------------------------------------------------------


def test_a_roll_back_gives_back_the_fields_that_were_archived_and_those_that_were_written_since(upgrading: Gallery) -> None:
    upgrading.store.upsert("texts_v1", [Record(id=7, vector=vector("v1", "t7"), fields={"n": 0, "doc": "123"})])
    zero = Record(id=9, vector=np.zeros(DIMS["v1"], np.float32), fields={"n": 0})
    upgrading.store.upsert("texts_v1", [zero], as_read=True)
    before = {id: (dict(each.fields), each.vector) for id, each in upgrading.records("texts_v1").items()}
    drive(upgrading)
    new = upgrading.records("texts_v2")
    upgrading.store.upsert("texts_v2", [replace(new[7], fields={"n": 0, "doc": 123})])  # what the engine made of the copy
    with upgrading.client() as client:
        client.upsert([{"id": 8, "item": "t8", "n": 88}])
    upgrading.store.upsert("texts_v2", [Record(id=6, vector=vector("v2", "other"), fields={"n": 66})])  # another program's
    conductor = upgrading.conductor()
    back = conductor.roll_back(upgrading.registry.upgrade(upgrading.upgrade.id))
    assert back is not None
    assert conductor.advance(back, upgrading.worker()).phase == Phase.CUT_OVER
    found = upgrading.records("texts_v1")
    assert {id: dict(each.fields) for id, each in found.items()} == {id: fields for id, (fields, _) in before.items()} | {
        6: {"n": 66},
        8: {"n": 88},
    }
    assert all(np.array_equal(found[id].vector, old) for id, (_, old) in before.items() if id != 8)  # type: ignore[arg-type]
