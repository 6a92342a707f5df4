"""What searches find: from a client's memory through the registry into the work list."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rmvdb.errors import PlanRefused, RegistryUnavailable
from rmvdb.learning.training import Method
from rmvdb.planning.plan import Question
from rmvdb.registry.codec import unpack_ids
from rmvdb.serving import traffic
from rmvdb.serving.client import Client
from rmvdb.types import Id
from rmvdb.upgrade import plan_step
from tests.support.inprocess import Gallery, make, vector

QUESTION = Question(gallery="texts", from_version="v1", to_version="v2", method=Method.NAIVE, order="traffic")


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts, before an upgrade."""
    made = make(tmp_path, deployed=False)
    made.registry.abandon(made.upgrade.id, note="another one is planned by the tests")
    yield made
    made.registry.close()


def found(gallery: Gallery) -> dict[str, float]:
    """What the registry knows of."""
    return gallery.registry.traffic(gallery.registry.gallery("texts").id)


def wait_until_found(gallery: Gallery) -> dict[str, float]:
    """The same, once it knows of something."""
    end = time.monotonic() + 10
    while not found(gallery) and time.monotonic() < end:
        time.sleep(0.02)
    return found(gallery)


# --- clients ----------------------------------------------------------------------------------------------------------


def test_what_searches_found_is_in_the_registry_when_the_client_leaves(gallery: Gallery) -> None:
    with gallery.client() as client:
        expected = [hit.id for _ in range(3) for hit in client.search("t7", limit=2)]
        expected += [hit.id for hit in client.search("t7", limit=1, offset=1)]  # two candidates are looked at for it
        client.get([1, 2, 3])
        client.query("n == 0")
        assert found(gallery) == {}
    known = found(gallery)

    assert set(known) == {str(id) for id in expected}
    assert max(known.values()) == pytest.approx(min(known.values()), rel=1e-4)


def test_a_client_that_stays_tells_once_a_period_without_a_search_that_waits(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "PERIOD", 0.3)
    telling: list[str] = []
    tell = gallery.registry.add_traffic

    def watched(*args: Any) -> None:
        telling.append(threading.current_thread().name)
        tell(*args)

    monkeypatch.setattr(gallery.registry, "add_traffic", watched)
    with gallery.client() as client:
        client.search("t7", limit=1)
        assert list(wait_until_found(gallery)) == ["7"]

    assert telling == ["rmvdb-plans-texts"]


def test_no_search_fails_because_nothing_can_be_counted(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def broken(*_: Any) -> None:
        failed.set()
        raise RegistryUnavailable("away")

    monkeypatch.setattr(traffic, "PERIOD", 0.0)
    monkeypatch.setattr(gallery.registry, "add_traffic", broken)
    with gallery.client() as client:
        client.search("t7")
        assert failed.wait(10)
        for _ in range(20):
            assert client.search("t7", limit=1)[0].id == 7
            time.sleep(0.03)
        assert client._current_plan._thread.is_alive()


def test_a_client_that_leaves_waits_only_once_for_a_registry_that_is_away(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def away(name: str) -> Any:
        def call(*_: Any) -> None:
            asked.append(name)
            raise RegistryUnavailable("away")

        return call

    for name in ("leave", "add_traffic"):
        monkeypatch.setattr(gallery.registry, name, away(name))
    with gallery.client() as client:
        client.search("t7")

    assert asked == ["leave"]


def test_counting_can_be_turned_off(gallery: Gallery) -> None:
    with Client(
        "texts", registry=gallery.registry, store=gallery.store, loaded_models=gallery.loaded_models, traffic=0
    ) as client:
        client.search("t7")

    assert found(gallery) == {}


def test_both_legs_of_an_upgrade_are_counted(tmp_path: Path) -> None:
    gallery = make(tmp_path)  # nothing is moved yet: what is found is in the old collection
    with gallery.client() as client:
        hits = client.search("t7", limit=3)

    assert {hit.leg for hit in hits} == {"texts_v1"}
    assert set(found(gallery)) == {str(hit.id) for hit in hits}
    gallery.registry.close()


# --- the work list ----------------------------------------------------------------------------------------------------


def listed(gallery: Gallery, question: Question) -> list[Id]:
    """The ids of the work list that an upgrade is given, in its order."""
    conductor = gallery.conductor()
    question = conductor.resolve(question)
    row = conductor.begin(question, conductor.plan(question), gallery.worker())
    conductor.deploy(row)
    conductor.list_work(gallery.registry.upgrade(row.id))
    batches = sorted(gallery.registry.batches(row.id), key=lambda batch: batch.priority)
    assert gallery.registry.upgrade(row.id).order == question.order
    return [id for batch in batches for id in unpack_ids(batch.ids)]


def test_what_searches_found_is_backfilled_first_and_the_rest_by_confidence(gallery: Gallery) -> None:
    with gallery.client() as client:
        for id, times in ((31, 3), (12, 5), (25, 1)):
            for _ in range(times):
                client.search(vector=vector("v1", f"t{id}"), model="v1", limit=1)
    order = plan_step.planner(gallery.conductor()).order(replace(QUESTION, order="cluster"), legs(gallery), None)[1]
    records = list(gallery.records("texts_v1").values())
    confidence = dict(zip((record.id for record in records), order.confidence(records).tolist(), strict=True))
    rest = sorted(set(confidence) - {12, 31, 25}, key=lambda id: (confidence[id], id))

    assert listed(gallery, QUESTION) == [12, 31, 25, *rest]


def legs(gallery: Gallery) -> Any:
    """The one leg that is served."""
    return gallery.registry.plan("texts").legs[0]


def test_where_no_search_has_been_counted_the_order_is_refused_and_the_way_out_named(gallery: Gallery) -> None:
    conductor = gallery.conductor()
    question = conductor.resolve(QUESTION)
    with pytest.raises(PlanRefused, match=r"No search of gallery 'texts' has been counted yet.*choose another --order"):
        conductor.plan(question)
    gallery.registry.add_traffic("texts", {7: 1})
    assert conductor.plan(question).order == "traffic"


def test_counts_that_are_lost_before_the_work_is_listed_stop_no_upgrade(gallery: Gallery) -> None:
    gallery.registry.add_traffic("texts", {7: 1})
    conductor = gallery.conductor()
    question = conductor.resolve(QUESTION)
    conductor.plan(question)
    with gallery.registry.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM traffic")

    assert sorted(listed(gallery, QUESTION)) == sorted(gallery.source.of)
