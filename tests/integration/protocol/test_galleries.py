"""Galleries that share a server, and a collection that cannot become one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rmvdb import errors
from rmvdb.catalog import galleries
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.registry.mark import mark_of
from rmvdb.serving.client import Client
from rmvdb.types import Field, IdType, Index, Metric, Schema
from tests.support.inprocess import DIMS, TIMES, Gallery, make


def test_two_projects_that_share_a_server_share_no_collection(tmp_path: Path) -> None:
    made = list[tuple[Gallery, list[str]]]()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        gallery = make(tmp_path / name, records=2, deployed=False)
        assert gallery.conductor().roll_back(gallery.upgrade) is None
        gallery.store = made[0][0].store if made else gallery.store
        gallery.store.drop(mark_of("texts_v1"))  # only here have both a collection of that name
        row = galleries.add_gallery(
            gallery.registry, gallery.store, gallery.loaded_models, name="photos", model="v1", collection=None, id_type=None,
            fields=[], source=None, loaded_source=None, chosen_index=Index(type="FLAT"), times=TIMES,
        )  # fmt: skip
        question = Question(gallery="texts", from_version="v1", to_version="v2", method=Method.NAIVE, order="random")
        conductor = gallery.conductor()
        question = conductor.resolve(replace(question, instant_rollback=True))
        begun = conductor.begin(question, conductor.plan(question), gallery.worker())
        made.append((gallery, [gallery.registry.collections(row.id)[0].name, *begun.made]))
    (one, names), (other, others) = made
    assert len({*names, *others}) == 6

    with Client("photos", registry=one.registry, store=one.store, loaded_models=one.loaded_models) as client:
        client.upsert([{"id": 1, "item": "one's"}])
        galleries.remove_gallery(other.registry, other.store, other.registry.gallery("photos"), drop=True)
        assert [hit.id for hit in client.search("one's")] == [1]
    for gallery, _ in made:
        gallery.registry.close()


@pytest.mark.parametrize(("field", "what"), [("item", "item"), ("id", "key")])
def test_a_collection_that_no_client_could_write_is_not_adopted(gallery: Gallery, field: str, what: str) -> None:
    schema = Schema(
        collection="theirs", dim=DIMS["v1"], metric=Metric.COSINE, id_type=IdType.INT64, id_field="pk",
        fields=(Field(name=field, type="VARCHAR", params={"max_length": 9}),),
    )  # fmt: skip
    gallery.store.create(schema, Index(type="FLAT"))
    with pytest.raises(errors.CannotAdopt, match=f"has a field '{field}', by which name a record .* has its {what}"):
        galleries.add_gallery(
            gallery.registry, gallery.store, gallery.loaded_models, name="theirs", model="v1", collection="theirs", id_type=None,
            fields=[], source=None, loaded_source=None, chosen_index=Index(type="FLAT"), times=TIMES,
        )  # fmt: skip


def test_a_collections_name_fits_whatever_it_is_made_of(gallery: Gallery) -> None:
    name = galleries.collection_name("g" * 255, "v2+8fdcc5e6.β", "u7")
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,254}", name)


def test_a_gallery_whose_registration_was_not_answered_is_there(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gallery.registry.add_gallery

    def answered_late(**values: Any) -> None:
        real(**values)
        real(**values)  # as the registry repeats it

    monkeypatch.setattr(gallery.registry, "add_gallery", answered_late)
    row = galleries.add_gallery(
        gallery.registry, gallery.store, gallery.loaded_models, name="photos", model="v1", collection=None, id_type=None,
        fields=[], source=None, loaded_source=None, chosen_index=Index(type="FLAT"), times=TIMES,
    )  # fmt: skip
    assert gallery.store.exists(gallery.registry.collections(row.id)[0].name)


def test_a_collection_of_another_gallery_is_refused_as_such(gallery: Gallery) -> None:
    with pytest.raises(errors.AlreadyExists, match="Collection 'texts_v1' belongs to gallery 'texts' already"):
        galleries.add_gallery(
            gallery.registry, gallery.store, gallery.loaded_models, name="photos", model="v1", collection="texts_v1",
            id_type=None, fields=[], source=None, loaded_source=None, chosen_index=Index(type="FLAT"), times=TIMES,
        )  # fmt: skip
