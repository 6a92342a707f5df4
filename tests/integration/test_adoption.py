"""Adopting a collection embeds a few of its records once, compares them with the stored vectors, and says how many match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rmvdb.catalog import galleries
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.types import Field, IdType, Index, Item, Metric, Record, Schema, Vectors
from tests.support.inprocess import DIMS, TIMES, Gallery, TextEmbedder, drive, make, vector


class Counting(TextEmbedder):
    """Remembers which items it embedded."""

    seen: list[Item] = []  # noqa: RUF012 (one list for the one test)

    def embed(self, items: Sequence[Item]) -> Vectors:
        """Embed as the embedder of texts."""
        self.seen += items
        return super().embed(items)


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    """A gallery, and beside it a collection `theirs` of the same texts."""
    made = make(tmp_path, records=20, deployed=False)
    schema = Schema(collection="theirs", dim=DIMS["v1"], metric=Metric.COSINE, id_type=IdType.INT64)
    made.store.create(schema, Index(type="FLAT"))
    made.store.upsert("theirs", [Record(id=id, vector=vector("v1", text)) for id, text in made.source.of.items()])
    return made


def test_a_collections_first_records_are_embedded_once_when_it_is_adopted_and_when_it_is_again(gallery: Gallery) -> None:
    said = list[str]()
    loaded_models = LoadedModels(
        load_embedder=Counting, load_chain=lambda version: Chain(embedder=version, dim=DIMS[version]), load_artifact=lambda _: b""
    )
    for _ in range(2):
        Counting.seen.clear()
        galleries.add_gallery(
            gallery.registry, gallery.store, loaded_models, name="theirs", model="v1", collection="theirs", id_type=None,
            fields=(), source="tests", loaded_source=gallery.source, chosen_index=Index(type="FLAT"), times=TIMES,
            say=said.append,
        )  # fmt: skip
        # Eight in one batch, and one of them alone, to see that the rows are in order.
        assert Counting.seen[:-1] == [f"t{id}" for id in range(1, 9)]
        assert Counting.seen[-1] in Counting.seen[:-1]
    assert said == ["8 records, embedded again, match the stored vectors"] * 2


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_field_that_came_after_the_adoption_is_in_the_new_collection_too(tmp_path: Path, dynamic: bool) -> None:
    """Milvus 2.6 adds fields to a collection. Without the field, no batch could be written, or the field became a dynamic one."""
    made = make(tmp_path, records=8, deployed=False)
    made.store.drop("texts_v2")
    old, fields = made.store._collections["texts_v1"], ("n", "shelf")
    declared = tuple(Field(name=name, type="INT64", params={"nullable": True}) for name in fields)
    old.schema = replace(old.schema, fields=declared, dynamic=dynamic)
    made.store.upsert("texts_v1", [Record(id=1, vector=vector("v1", "t1"), fields={"n": 1, "shelf": 7})])
    made.conductor().deploy(made.upgrade)
    assert tuple(field.name for field in made.store.describe("texts_v2").fields) == fields
    drive(made)
    assert made.store.get("texts_v2", [1])[0].fields == {"n": 1, "shelf": 7}
    made.registry.close()
