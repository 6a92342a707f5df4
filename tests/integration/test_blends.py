"""An upgrade whose old collection is searched with both models' queries in one vector, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rmvdb.errors import Mismatch
from rmvdb.planning.plan import Stage
from rmvdb.types import Blend, Phase
from rmvdb.upgrade import epoch_legs
from tests.support.blends import WEIGHT, begin, blend, both, by_hand, expect_hits, go_on
from tests.support.inprocess import Gallery, make, vector
from tests.support.kept_original import put, without_v1


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, before an upgrade."""
    made = make(tmp_path, deployed=False)
    made.registry.abandon(made.upgrade.id, note="another one is planned by the tests")
    yield made
    made.registry.close()


@pytest.mark.parametrize("until", [0.0, 0.5])
def test_a_search_finds_what_the_blended_query_finds_by_hand(gallery: Gallery, until: float) -> None:
    stage = blend(gallery)
    row = go_on(gallery, begin(gallery, stage, until=until, cutover=False))
    assert (len(gallery.records(row.new_collection)) == 0) == (until == 0.0)
    with gallery.client() as client:
        assert client.plan.embedders == ("v2", "v1")
        for item in ("t3", "t21", "anything"):
            queries = {row.new_collection: vector("v2", item), "texts_v1": both(gallery, item, str(stage.reverse))}
            expect_hits(client.search(item, limit=40), by_hand(gallery, queries))


def test_in_the_end_the_new_model_alone_is_asked(gallery: Gallery) -> None:
    row = go_on(gallery, begin(gallery, blend(gallery)))
    assert row.phase == Phase.CUT_OVER
    with gallery.client() as client:
        assert client.plan.embedders == ("v2",)
        expect_hits(client.search("t3", limit=40), by_hand(gallery, {row.new_collection: vector("v2", "t3")}))
    assert len(gallery.records(row.new_collection)) == 40


def test_a_write_shows_at_once_and_goes_into_the_old_collection_as_the_old_model_makes_it(gallery: Gallery) -> None:
    stage = blend(gallery)
    row = go_on(gallery, begin(gallery, stage, until=0.5, cutover=False))
    still = next(iter(gallery.records("texts_v1")))
    moved = next(iter(gallery.records(row.new_collection)))
    with gallery.client() as client, gallery.client() as other:
        for id in (still, moved, 90):
            put(gallery, client, int(id), f"newer {id}")
            assert client.search(f"newer {id}", limit=1)[0].id == id
            queries = {
                row.new_collection: vector("v2", f"newer {id}"),
                "texts_v1": both(gallery, f"newer {id}", str(stage.reverse)),
            }
            for each in (client, other):
                expect_hits(each.search(f"newer {id}", limit=41), by_hand(gallery, queries))
    held = gallery.records("texts_v1")
    np.testing.assert_allclose(held[still].vector, vector("v1", f"newer {still}"), atol=1e-6)  # type: ignore[arg-type]
    assert go_on(gallery, row, until=1.0, cutover=True).phase == Phase.CUT_OVER
    assert gallery.records("texts_v1") == {}
    for id, record in gallery.records(row.new_collection).items():
        np.testing.assert_allclose(record.vector, vector("v2", gallery.source.of[id]), atol=1e-6)  # type: ignore[arg-type]


def test_a_schedule_leads_from_a_blend_to_the_new_model_alone(gallery: Gallery) -> None:
    first = blend(gallery)
    row = go_on(gallery, begin(gallery, first, replace(first, blend=None), switch=0.5, until=0.25, cutover=False))
    with gallery.client() as client:
        assert client.plan.legs[1].blend == Blend(embedder="v1", weight=WEIGHT)
        go_on(gallery, row, until=0.75)
        client._current_plan.refresh()
        assert client.plan.legs[1].blend is None
        assert client.plan.embedders == ("v2",)
        reached = gallery.loaded_models.apply([str(first.reverse)], vector("v2", "t3")[None])[0]
        expect_hits(
            client.search("t3", limit=40), by_hand(gallery, {row.new_collection: vector("v2", "t3"), "texts_v1": reached})
        )


def test_a_client_of_the_plan_before_searches_on_and_then_by_the_blend(gallery: Gallery) -> None:
    stage = blend(gallery)
    with gallery.client() as client:
        before = client.plan
        by_v1 = by_hand(gallery, {"texts_v1": vector("v1", "t3")})
        expect_hits(client.search("t3", limit=40), by_v1)
        row = begin(gallery, stage, until=0.0, cutover=False)
        assert client.plan.epoch == before.epoch
        expect_hits(client.search("t3", limit=40), by_v1)
        go_on(gallery, row)
        client._current_plan.refresh()
        assert client.plan.legs[1].blend == Blend(embedder="v1", weight=WEIGHT)
        expect_hits(client.search("t3", limit=40), by_hand(gallery, {"texts_v1": both(gallery, "t3", str(stage.reverse))}))


def test_a_roll_back_restores_every_vector_and_the_old_queries(gallery: Gallery) -> None:
    before = gallery.records("texts_v1")
    row = go_on(gallery, begin(gallery, blend(gallery), until=0.5, cutover=False))
    moved = next(iter(gallery.records(row.new_collection)))
    with gallery.client() as client:
        put(gallery, client, int(moved), "newer")
        put(gallery, client, 90, "new")
        back = gallery.conductor().roll_back(gallery.registry.upgrade(row.id))
        assert back is not None
        assert go_on(gallery, back).phase == Phase.CUT_OVER
        client._current_plan.refresh()
        assert client.plan.embedders == ("v1",)
        assert client.plan.legs[0].blend is None
        assert client.search("new", limit=1)[0].id == 90
    held = gallery.records("texts_v1")
    assert held.keys() == before.keys() | {90}
    for id, record in held.items():
        np.testing.assert_allclose(record.vector, vector("v1", gallery.source.of[id]), atol=1e-6)  # type: ignore[arg-type]


def test_a_roll_back_without_the_old_model_serves_the_new_models_part_alone(gallery: Gallery) -> None:
    stage = blend(gallery)
    row = go_on(gallery, begin(gallery, stage, until=0.5, cutover=False))
    gallery.loaded_models._load_embedder = without_v1
    gallery.loaded_models._loaded.pop(("Embedder", "v1"), None)
    back = gallery.conductor().roll_back(gallery.registry.upgrade(row.id))
    assert back is not None
    assert go_on(gallery, back).phase == Phase.CUT_OVER
    with gallery.client() as client:
        assert client.plan.embedders == ("v2",)
        put(gallery, client, 90, "new")
        reached = gallery.loaded_models.apply([str(stage.reverse)], vector("v2", "new")[None])[0]
        expect_hits(client.search("new", limit=41), by_hand(gallery, {"texts_v1": reached}))
        assert client.search("new", limit=1)[0].id == 90


def test_an_original_that_is_kept_is_written_by_its_own_model_and_serves_again_in_one_epoch(gallery: Gallery) -> None:
    row = go_on(gallery, begin(gallery, blend(gallery), until=0.5, cutover=False, instant_rollback=True))
    (mirror,) = gallery.registry.plan("texts").mirrors
    assert (mirror.collection, mirror.embedder, mirror.blend) == ("texts_v1", "v1", None)
    with gallery.client() as client:
        put(gallery, client, 90, "new")
        put(gallery, client, 3, "newer")
        back = gallery.conductor().roll_back(gallery.registry.upgrade(row.id))
        assert back is not None
        assert go_on(gallery, back).phase == Phase.CUT_OVER
        client._current_plan.refresh()
        assert client.plan.embedders == ("v1",)
        for id, record in gallery.records("texts_v1").items():
            np.testing.assert_allclose(record.vector, vector("v1", gallery.source.of[id]), atol=1e-6)  # type: ignore[arg-type]
        expect_hits(client.search("new", limit=41), by_hand(gallery, {"texts_v1": vector("v1", "new")}))


@pytest.mark.parametrize("again", [False, True])
def test_a_third_version_ends_the_blend_of_the_second_or_brings_its_own(gallery: Gallery, again: bool) -> None:
    first = blend(gallery)
    two = go_on(gallery, begin(gallery, first, until=0.5, cutover=False))
    stage = replace(blend(gallery, start="v3", end="v2", legs=3), **({} if again else {"blend": None}))
    row = go_on(gallery, begin(gallery, stage, to="v3", until=0.25, cutover=False))
    with gallery.client() as client:
        new, newer, oldest = client.plan.legs
        assert (new.collection, newer.collection, oldest.collection) == (row.new_collection, two.new_collection, "texts_v1")
        assert oldest.transforms == (stage.reverse, first.reverse)
        assert client.plan.embedders == (("v3", "v2") if again else ("v3",))
        assert newer.blend == (Blend(embedder="v2", weight=WEIGHT) if again else None)
        # Behind a blended leg the old part is what the leg was reached by before, without the model before that.
        assert oldest.blend == (Blend(embedder="v2", transforms=(str(first.reverse),), weight=WEIGHT) if again else None)
        queries = {
            leg.collection: made[0] for leg, made in zip(
                client.plan.legs, gallery.loaded_models.queries(client.plan, ["t3"], {}).values(), strict=True
            )
        }  # fmt: skip
        expect_hits(client.search("t3", limit=40), by_hand(gallery, queries))
        put(gallery, client, 90, "new")
        assert client.search("new", limit=1)[0].id == 90
    assert go_on(gallery, row, until=1.0, cutover=True).phase == Phase.CUT_OVER
    assert gallery.records(row.new_collection).keys() == gallery.source.of.keys()


def test_a_ready_vector_of_the_new_model_is_enough_for_a_blended_plan(gallery: Gallery) -> None:
    stage = blend(gallery)
    row = go_on(gallery, begin(gallery, stage, until=0.5, cutover=False))
    reached = gallery.loaded_models.apply([str(stage.reverse)], vector("v2", "t3")[None])[0]
    with gallery.client() as client:
        hits = client.search(vector=vector("v2", "t3"), model="v2", limit=40)
        expect_hits(hits, by_hand(gallery, {row.new_collection: vector("v2", "t3"), "texts_v1": reached}))
        with pytest.raises(Mismatch, match="No transform leads from vectors of model 'v1'"):
            client.search(vector=vector("v1", "t3"), model="v1")


def test_a_leg_that_no_transform_reaches_is_searched_with_its_own_queries(gallery: Gallery) -> None:
    """Behind an upgrade by `naive`, the oldest collection has queries of its own, and no blend needs them twice."""
    naive = Stage(calibrations=(None, None))
    go_on(gallery, begin(gallery, naive, until=0.5, cutover=False))
    row = begin(gallery, blend(gallery, start="v3", end="v2", legs=3), to="v3", until=0.0, cutover=False)
    *_, oldest = go_on(gallery, row).plan.legs(epoch_legs.EpochName.SERVING)
    assert (oldest.embedder, oldest.blend) == ("v1", None)
