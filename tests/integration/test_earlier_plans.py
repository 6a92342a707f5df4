"""An upgrade that an earlier rmvdb planned goes on, though an order or an option that it names is gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rmvdb.errors import UnknownName
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.registry.codec import unpack_ids
from rmvdb.types import Phase
from tests.support.inprocess import Gallery, make

QUESTION = Question(gallery="texts", from_version="v1", to_version="v2", method=Method.NAIVE)


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, before an upgrade."""
    made = make(tmp_path, deployed=False)
    made.registry.abandon(made.upgrade.id, note="another one is planned by the tests")
    yield made
    made.registry.close()


@pytest.mark.parametrize("listed", [False, True])
def test_an_upgrade_in_the_order_of_traffic_goes_on(gallery: Gallery, listed: bool) -> None:
    conductor = gallery.conductor()
    question = conductor.resolve(QUESTION)
    row = conductor.begin(question, conductor.plan(question), gallery.worker())
    if listed:
        conductor.deploy(row)
        conductor.list_work(gallery.registry.upgrade(row.id))
    earlier = asdict(question) | {"order": "traffic", "tune": True}
    gallery.registry.set_upgrade(row.id, order="traffic", plan=replace(row.plan, question=earlier))

    row = conductor.advance(gallery.registry.upgrade(row.id), gallery.worker())

    assert (row.phase, row.order) == (Phase.CUT_OVER, "traffic")
    batches = gallery.registry.batches(row.id)
    assert sorted(id for batch in batches for id in unpack_ids(batch.ids)) == sorted(gallery.source.of)
    assert gallery.records(row.new_collection).keys() == gallery.source.of.keys()


def test_a_new_plan_in_the_order_of_traffic_is_refused(gallery: Gallery) -> None:
    conductor = gallery.conductor()
    question = conductor.resolve(replace(QUESTION, order="traffic"))

    with pytest.raises(UnknownName, match="No order is called 'traffic'; there are: centroid, classification-score"):
        conductor.plan(question)
