"""Items that no model can read, and a source or a model that is broken altogether."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rmvdb import errors
from rmvdb.backfill.batches import Backfill
from rmvdb.items import sources
from rmvdb.items.callable import CallableSource
from rmvdb.items.digest import item_digest
from rmvdb.items.field import FieldSource
from rmvdb.planning.sample import Sample, Sampler, vectors_of
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import Id, Item, Leg, Metric, Phase, Record, Vectors
from tests.support import inprocess
from tests.support.faults import drive
from tests.support.inprocess import Gallery, Texts, make, vector


@pytest.mark.parametrize("kind", ["broken", "missing"])
def test_a_batch_of_bad_items_is_set_aside_where_items_are_made_of_fields(gallery: Gallery, kind: str) -> None:
    gallery.registry.discard_list(gallery.upgrade.id)
    gallery.registry.add_batches(gallery.upgrade.id, [([1, 2, 3, 4], None), ([5, 6, 7, 8], None)], first=1)
    bad = {"text": "broken"} if kind == "broken" else {}
    texts = {id: bad if id > 4 else {"text": f"t{id}"} for id in gallery.source.of}
    old = [Record(id=id, vector=vector("v1", f"t{id}"), fields={"n": 0, **fields}) for id, fields in texts.items()]
    gallery.store.upsert(gallery.task.old[0], old)
    backfill = Backfill(
        registry=gallery.registry, store=gallery.store, loaded_models=gallery.loaded_models, source=FieldSource("text"),
        archive=gallery.archive,
    )  # fmt: skip
    gallery.worker(width=1, lease=30.0).run(gallery.task, backfill)
    assert {row.record for row in gallery.registry.quarantined(gallery.upgrade.id)} == {"5", "6", "7", "8"}


def test_a_batch_whose_rows_come_in_another_order_is_not_copied(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model did so neither when it was registered nor while the plan was made."""
    embed = inprocess.TextEmbedder.embed
    monkeypatch.setattr(inprocess.TextEmbedder, "embed", lambda self, items: embed(self, items)[::-1])
    with pytest.raises(errors.ModelError, match="gives another vector for item"):
        drive(gallery)
    assert gallery.held()["new"] == {}
    monkeypatch.undo()
    drive(gallery)
    gallery.expect_moved()


@pytest.mark.parametrize("kind", ["broken", "missing"])
def test_bad_items_that_come_first_in_the_order_are_set_aside_by_what_the_plan_embedded(tmp_path: Path, kind: str) -> None:
    """A classifier is least sure of blank pictures, so that nothing is in the new collection yet."""
    gallery = make(tmp_path, records=40)
    for id in range(1, 21):
        _spoil(gallery, id, kind)
    old, ids = gallery.held()["old"], list(range(31, 41))
    cache = EmbeddingCache(LocalFolder(tmp_path / "embeddings"), model="v2")
    items = [f"t{id}" for id in ids]
    cache.put(
        ids,
        vectors_of([old[id] for id in ids]),
        [item_digest(item) for item in items],
        np.stack([vector("v2", item) for item in items]),
    )
    backfill = Backfill(
        registry=gallery.registry, store=gallery.store, loaded_models=gallery.loaded_models, source=gallery.source,
        archive=gallery.archive, cache=cache,
    )  # fmt: skip
    gallery.worker(width=1).run(gallery.task, backfill)
    assert len(gallery.registry.quarantined(gallery.upgrade.id)) == 20
    assert set(gallery.held()["new"]) == set(range(21, 41))
    gallery.registry.close()


def test_an_item_that_changed_since_the_plan_is_embedded_again_though_the_old_model_does_not_see_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old model reads the first word only, and the record was written before the upgrade began."""
    monkeypatch.setattr(inprocess, "vector", lambda model, item: vector(model, item.split()[0] if model == "v1" else item))
    gallery = make(tmp_path, records=20, deployed=False)
    _sample(gallery)
    with gallery.client() as client:
        for id in (3, 4):
            gallery.source.of[id] += " and more"
            client.upsert([{"id": id, "item": gallery.source.of[id], "n": 1}])
    made = EmbeddingCache(LocalFolder(gallery.folder / "embeddings"), model="v2")
    old = gallery.records("texts_v1")
    items = [gallery.source.of[id] for id in old]
    assert made.knows(old) == set(old)
    assert set(made.get(list(old), vectors_of(list(old.values())), list(map(item_digest, items)))) == set(old) - {3, 4}
    gallery.conductor().deploy(gallery.upgrade)
    backfill = Backfill(
        registry=gallery.registry, store=gallery.store, loaded_models=gallery.loaded_models, source=gallery.source,
        archive=gallery.archive, cache=made,
    )  # fmt: skip
    gallery.worker().run(gallery.task, backfill)
    gallery.expect_moved()
    gallery.registry.close()


@pytest.mark.parametrize("kind", ["broken", "missing"])
@pytest.mark.parametrize("bad", [range(1, 11), range(1, 6), range(1, 41, 4)])
def test_an_item_that_broke_after_the_plan_is_set_aside_and_the_next_plan_leaves_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bad: Sequence[int]
) -> None:
    """All of a batch, half of one, some of each."""
    monkeypatch.setattr("rmvdb.planning.sample.CHUNK", 10)
    gallery = make(tmp_path)
    assert _sample(gallery).skipped == 0
    for id in bad:
        _spoil(gallery, id, kind)
    assert _sample(gallery).skipped == len(bad)
    assert _sample(gallery).skipped == len(bad)
    backfill = Backfill(
        registry=gallery.registry, store=gallery.store, loaded_models=gallery.loaded_models, source=gallery.source,
        archive=gallery.archive, cache=EmbeddingCache(LocalFolder(gallery.folder / "embeddings"), model="v2"),
    )  # fmt: skip
    gallery.worker(width=1).run(gallery.task, backfill)
    assert {row.record for row in gallery.registry.quarantined(gallery.upgrade.id)} == set(map(str, bad))
    assert set(gallery.held()["new"]) == set(range(1, 41)) - set(bad)
    gallery.registry.close()


@pytest.mark.parametrize("kind", ["broken", "missing"])
@pytest.mark.parametrize("bad", [range(1, 11), range(11, 21), [21]])
def test_bad_items_that_lie_together_are_left_out_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bad: Sequence[int]
) -> None:
    monkeypatch.setattr("rmvdb.planning.sample.CHUNK", 10)
    gallery = make(tmp_path, records=21)
    for id in bad:
        _spoil(gallery, id, kind)
    sample = _sample(gallery)
    assert {record.id for record in sample.records} == set(range(1, 22)) - set(bad)
    assert sample.skipped == len(bad)
    gallery.registry.close()


@pytest.mark.parametrize(("kind", "saying"), [("broken", "for each of 8 items"), ("missing", "no item for any of 8 records")])
def test_if_no_item_is_good_the_source_or_the_model_is_broken(gallery: Gallery, kind: str, saying: str) -> None:
    for id in range(1, 9):
        _spoil(gallery, id, kind)
    for act in (lambda: _sample(gallery), lambda: drive(gallery)):
        with pytest.raises(errors.RmvdbError, match=saying):
            act()
    assert not gallery.registry.quarantined(gallery.upgrade.id)


def _spoil(gallery: Gallery, id: Id, kind: str) -> None:
    if kind == "broken":
        gallery.source.of[id] = "broken"
    else:
        del gallery.source.of[id]


def _sample(gallery: Gallery) -> Sample:
    sampler = Sampler(
        store=gallery.store, loaded_models=gallery.loaded_models, source=gallery.source,
        cache=lambda version: EmbeddingCache(LocalFolder(gallery.folder / "embeddings"), model=version),
    )  # fmt: skip
    leg = Leg(collection=gallery.task.old[0], model="v1", metric=Metric.COSINE, embedder="v1")
    return sampler.sample("v2", [leg], [1000], frozenset(), lambda *_: None, seed=0)


@pytest.mark.parametrize("source", ["mended", "broken"])
def test_a_quarantined_record_that_is_written_again_is_moved(gallery: Gallery, source: str) -> None:
    gallery.source.of[3] = "broken"
    conductor, worker = gallery.conductor(), gallery.worker()
    with pytest.raises(errors.Quarantined, match="1 record is quarantined, such as '3'"):
        conductor.advance(gallery.registry.upgrade(gallery.upgrade.id), worker)
    gallery.source.of[3] = source
    with gallery.client() as client:
        client.upsert([{"id": 3, "item": "mended", "n": 1}])
        row = conductor.advance(gallery.registry.upgrade(gallery.upgrade.id), worker)
        assert row.phase == Phase.CUT_OVER
        assert [hit.id for hit in client.search("mended", limit=8)].count(3) == 1
    gallery.source.of[3] = "mended"
    gallery.expect_moved()
    assert not gallery.registry.quarantined(gallery.upgrade.id)


def test_the_refusal_of_a_sample_of_an_empty_gallery_says_how_to_begin_with_the_new_model(tmp_path: Path) -> None:
    gallery = make(tmp_path, records=0, deployed=False)
    with pytest.raises(errors.PlanRefused, match="rmvdb gallery remove, then rmvdb gallery add --model v2"):
        _sample(gallery)


@pytest.mark.parametrize("fit", [3, 0])
def test_items_that_do_not_fit_into_memory_together_are_embedded_in_smaller_parts(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, fit: int
) -> None:
    class Large:
        def load(self, records: Sequence[Record]) -> Mapping[Id, Item]:
            if len(records) > fit:
                raise MemoryError
            return Texts.load(gallery.source, records)

    monkeypatch.setattr("rmvdb.items.callable.load_object", lambda *_, **__: Large())
    monkeypatch.setattr(gallery.source, "load", CallableSource("models:large").load)
    if fit:
        drive(gallery)
        gallery.expect_moved()
    else:
        with pytest.raises(errors.SourceError, match=r"does not fit into memory; .* make backfill.batch smaller"):
            drive(gallery)


@pytest.mark.parametrize("year", ["none", [2020]], ids=["text", "list"])
def test_a_record_whose_fields_do_not_fit_the_pattern_of_its_file_is_set_aside(
    gallery: Gallery, tmp_path: Path, year: object
) -> None:
    old = [Record(id=id, vector=vector("v1", text), fields={"year": 2020}) for id, text in gallery.source.of.items()]
    old[6] = replace(old[6], fields={"year": year})
    gallery.store.upsert(gallery.task.old[0], old)
    for id in gallery.source.of:
        Image.new("L", (2, 2), id).save(tmp_path / f"2020-{id}.png")

    class Pictures:
        def embed(self, items: Sequence[Item]) -> Vectors:
            return np.stack([vector("v2", str(np.asarray(Image.open(item))[0, 0])) for item in items])

    gallery.loaded_models._loaded["Embedder", "v2"] = Pictures()
    backfill = Backfill(
        registry=gallery.registry, store=gallery.store, loaded_models=gallery.loaded_models,
        source=sources.load(f"folder:{tmp_path}/{{year:04d}}-{{id}}.png"), archive=gallery.archive,
    )  # fmt: skip
    gallery.worker(width=1).run(gallery.task, backfill)
    aside = gallery.registry.quarantined(gallery.upgrade.id)
    assert [row.record for row in aside] == ["7"]
    assert "does not fit record 7" in aside[0].reason
    assert len(gallery.held()["new"]) == len(gallery.source.of) - 1


def test_what_clients_wrote_is_embedded_again_in_parts_that_fit_into_memory(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(gallery)
    with gallery.client() as client:
        client.upsert([{"id": id, "item": f"t{id}", "n": 1} for id in range(1, 8)])
    asked: list[int] = []

    def load(records: Sequence[Record]) -> Mapping[Id, Item]:
        if len(records) > 3:
            raise MemoryError
        asked.extend(record.id for record in records if isinstance(record.id, int))
        return Texts.load(gallery.source, records)

    monkeypatch.setattr(gallery.source, "load", load)
    report = gallery.conductor().verify(gallery.registry.upgrade(gallery.upgrade.id), sample=100)
    assert report.ok
    assert set(range(1, 8)) <= set(asked)
