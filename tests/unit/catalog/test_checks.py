"""A collection is checked against its row: its schema, its ids, and the model that made its vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rmvdb import errors
from rmvdb.catalog import checks
from rmvdb.engines.faiss import FaissStore
from rmvdb.items.field import FieldSource
from rmvdb.types import IdType, Index, Metric, Record, Schema, Segments
from tests.support.inprocess import DIMS, Gallery, make, vector

SCHEMA = Schema(collection="theirs", dim=DIMS["v1"], metric=Metric.COSINE, id_type=IdType.INT64)


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    """A gallery of v1, and beside it an empty collection `theirs`."""
    made = make(tmp_path, records=20, deployed=False)
    made.store.create(SCHEMA, Index(type="FLAT"))
    return made


def fill(gallery: Gallery, *, by: list[str]) -> None:
    """Put one record into `theirs` for each version in `by`: the vector of its text, of the length that v1's have."""
    texts = list(gallery.source.of.items())
    records = [
        Record(id=id, vector=vector(version, text)[: DIMS["v1"]], fields={"text": text})
        for (id, text), version in zip(texts, by, strict=False)
    ]
    gallery.store.upsert("theirs", records)


def made_by_v1(gallery: Gallery, source: Any = None) -> int:
    """Compare `theirs` with v1."""
    version = gallery.registry.version("v1")
    return checks.check_made(gallery.store, gallery.loaded_models, "theirs", version, source or gallery.source)


@pytest.mark.parametrize(
    ("version", "way_out"),
    [
        ({"dim": 7, "metric": "COSINE"}, "has dimension 6, model version 'v9' gives 7; name the version"),
        ({"dim": 6, "metric": "L2"}, "is compared by COSINE, model version 'v9' by L2; register it anew: rmvdb model remove v9"),
    ],
    ids=["dimension", "metric"],
)
def test_a_collection_of_another_dimension_or_metric_does_not_fit_a_version(version: dict[str, Any], way_out: str) -> None:
    with pytest.raises(errors.Mismatch, match=way_out):
        checks.check_fits(SCHEMA, SimpleNamespace(name="v9", **version))  # type: ignore[arg-type]


def test_a_collection_that_was_made_anew_is_not_the_registered_one(gallery: Gallery) -> None:
    row = gallery.registry.collection(gallery.registry.plan("texts").legs[0].collection)
    assert checks.check_unchanged(gallery.store, row) == gallery.store.describe(row.name)
    gallery.store.drop(row.name)
    gallery.store.create(replace(SCHEMA, collection=row.name, metric=Metric.L2), Index(type="FLAT"))
    with pytest.raises(errors.CollectionChanged, match="has metric L2, not COSINE as when it was registered"):
        checks.check_unchanged(gallery.store, row)


def test_records_of_the_named_model_agree_and_each_is_counted(gallery: Gallery) -> None:
    fill(gallery, by=["v1"] * 5)
    assert made_by_v1(gallery) == 5


def test_no_more_records_are_embedded_than_a_check_needs(gallery: Gallery) -> None:
    fill(gallery, by=["v1"] * 20)
    assert made_by_v1(gallery) == checks.COMPARED


@pytest.mark.parametrize(("by", "refused"), [(["v1", "v1", "v2"], False), (["v1", "v2", "v2"], True), (["v1", "v2"], False)])
def test_vectors_are_another_models_if_more_than_half_of_them_differ(gallery: Gallery, by: list[str], refused: bool) -> None:
    fill(gallery, by=by)
    if not refused:
        assert made_by_v1(gallery) == len(by)
        return
    with pytest.raises(errors.Mismatch, match="2 of 3 records, such as 2, gave another vector; name the version, or the source"):
        made_by_v1(gallery)


def test_a_field_that_no_record_has_is_refused_with_those_that_are_there(gallery: Gallery) -> None:
    fill(gallery, by=["v1"] * 3)
    assert made_by_v1(gallery, FieldSource("text")) == 3
    with pytest.raises(errors.UsageError, match="has no field 'caption', from which --source takes the items; it has: text"):
        made_by_v1(gallery, FieldSource("caption"))


def test_an_empty_collection_has_nothing_to_compare(gallery: Gallery) -> None:
    assert made_by_v1(gallery, FieldSource("caption")) == 0


@pytest.mark.parametrize(
    ("compared", "said"),
    [
        (0, checks.UNCOMPARED),
        (1, "1 record, embedded again, matches the stored vectors"),
        (2, "2 records, embedded again, match the stored vectors"),
    ],
)
def test_how_many_were_compared_is_said(compared: int, said: str) -> None:
    assert checks.say_compared(compared) == said


def test_a_gallery_whose_embedder_cannot_be_loaded_is_not_compared(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    row, parts = gallery.registry.gallery("texts"), (gallery.registry, gallery.store, gallery.loaded_models)
    assert checks.check_vectors(*parts, row, gallery.source) == "8 records, embedded again, match the stored vectors"

    def gone(version: str) -> None:
        raise errors.ModelError(f"{version} is gone; bring it back")

    monkeypatch.setattr(gallery.loaded_models, "embedder", gone)
    assert checks.check_vectors(*parts, row, gallery.source) == checks.UNCOMPARED


def test_records_that_clients_wrote_during_an_upgrade_are_not_compared_with_the_old_model(tmp_path: Path) -> None:
    """ψ made their vectors in the old collection. Doctor took them for another model's."""
    made = make(tmp_path)
    parts = made.registry, made.store, made.loaded_models, made.registry.gallery("texts"), made.source
    with made.client() as client:
        client.upsert([{"id": id, "item": f"t{id}", "n": 0} for id in range(1, 9)])

    def as_psi_makes(ids: range) -> None:
        made.store.upsert("texts_v1", [Record(id=id, vector=vector("v1", f"ψ{id}"), fields={"n": 0}) for id in ids])

    as_psi_makes(range(1, 9))
    assert "match the stored vectors" in checks.check_vectors(*parts)
    as_psi_makes(range(9, 41))
    with pytest.raises(errors.Mismatch, match="were not made by model version 'v1'"):
        checks.check_vectors(*parts)
    made.registry.close()


def test_rows_that_a_filtered_search_may_miss_are_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaissStore()
    store.create(SCHEMA, Index(type="FLAT"))
    assert checks.say_unsettled(store, "theirs", "texts") == ""
    monkeypatch.setattr(store, "segments", lambda collection: Segments(rows=5, fresh=3))
    assert "3 rows are not flushed" in checks.say_unsettled(store, "theirs", "texts")
    assert checks.say_unsettled(store, "theirs", "texts").endswith("rmvdb gallery settle texts")
