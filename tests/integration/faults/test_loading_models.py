"""A client loads the next model slowly, or cannot load it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rmvdb import errors
from rmvdb.serving.client import Client
from rmvdb.serving.current_plan import CurrentPlan
from rmvdb.serving.latency import Latency
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.types import ServingPlan
from tests.support.inprocess import DIMS, TIMES, Gallery, TextEmbedder, make
from tests.support.waiting import wait_until


class SlowToLoad:
    """Loads v2's embedder until the test ends the load. Fails after `seconds`."""

    def __init__(self, seconds: float = 30.0) -> None:
        self.seconds, self.began, self.may_end, self.failed = seconds, threading.Event(), threading.Event(), False

    def __call__(self, version: str) -> TextEmbedder:
        """Return the embedder."""
        if version == "v2":
            self.began.set()
            if not self.may_end.wait(self.seconds):
                self.failed = True
                raise errors.ModelError("no room for it")
        return TextEmbedder(version)


def application(gallery: Gallery, load: Callable[[str], Any]) -> Client:
    """Return a client in a process of its own, where models are loaded like that."""
    loaded_models = LoadedModels(
        load_embedder=load, load_chain=lambda version: Chain(embedder=version, dim=DIMS[version]), load_artifact=lambda _: b""
    )
    return Client("texts", registry=gallery.registry, store=gallery.store, loaded_models=loaded_models, engine_timeout=1.0)


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Gallery]:
    """Eight texts in the old collection, which is served alone; a plan is old after half a second."""
    made = make(tmp_path, records=8, deployed=False, times=TIMES | {"max_age": 0.5})
    yield made
    made.registry.close()


@pytest.fixture
def _in_step(hasty: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch is asked for just after a client asked for its plan: a machine that stands still makes no client silent."""
    refresh, activate, asked = hasty.registry.refresh, hasty.registry.activate, threading.Event()

    def refreshed(*args: Any, **options: Any) -> Any:
        serving = refresh(*args, **options)
        if threading.current_thread().name.startswith("rmvdb-plans"):
            asked.set()
        return serving

    def activated(*args: Any, **options: Any) -> Any:
        asked.clear()
        assert asked.wait(60.0), "the client no longer asks"
        return activate(*args, **options)

    monkeypatch.setattr(hasty.registry, "refresh", refreshed)
    monkeypatch.setattr(hasty.registry, "activate", activated)


@pytest.mark.usefixtures("_in_step")
def test_searches_go_on_while_the_next_model_is_loaded_and_the_epoch_waits_for_it(hasty: Gallery) -> None:
    load, took = SlowToLoad(), list[float]()
    with application(hasty, load) as client, ThreadPoolExecutor(1) as pool:
        client.search("t3", limit=1)
        deploying = pool.submit(hasty.conductor().deploy, hasty.upgrade)
        try:
            assert load.began.wait(30.0)
            for _ in range(20):
                began = time.monotonic()
                assert [hit.id for hit in client.search("t3", limit=1)] == [3]
                took.append(time.monotonic() - began)
                time.sleep(hasty.times["max_age"] / 4)
            assert (load.failed, deploying.done()) == (False, False)
        finally:
            load.may_end.set()
        while not deploying.done():
            assert [hit.id for hit in client.search("t3", limit=1)] == [3]
        deploying.result()
        time.sleep(hasty.times["max_age"])
        assert len(client._current_plan.current().legs) == 2
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]
    assert sorted(took)[10] < 0.5


@pytest.mark.usefixtures("_in_step")
def test_an_epoch_that_a_client_cannot_serve_does_not_begin_however_long_it_takes_to_see_that(hasty: Gallery) -> None:
    heard = list[str]()
    conductor = hasty.conductor()

    def say(words: str) -> None:
        heard.append(words)
        if "no room for it" in words:
            conductor.stop.set()

    conductor.say = say
    with application(hasty, SlowToLoad(seconds=3.0)) as client:
        client.search("t3", limit=1)
        with pytest.raises(errors.Stopped):
            conductor.deploy(hasty.upgrade)
        assert [hit.id for hit in client.search("t3", limit=1)] == [3]
    assert any("cannot serve epoch 2 yet: ModelError: no room for it" in words for words in heard), heard


def test_a_plan_that_cannot_be_loaded_puts_off_no_later_one(hasty: Gallery) -> None:
    tried = list[int]()

    def prepare(plan: ServingPlan) -> None:
        tried.append(plan.epoch)
        if plan.epoch == 2:
            raise errors.ModelError("no room for it")

    registry = hasty.registry
    plans = CurrentPlan("texts", registry=registry, prepare=prepare, name="one", latency=Latency())
    assert registry.announce("texts", plans.current().legs, hasty.times | {"staleness": 1.0}) == 2
    wait_until(lambda: plans._failed == 2)
    plans._again_at = math.inf  # as far away as after many tries
    assert registry.announce("texts", plans.current().legs, hasty.times | {"staleness": 2.0}) == 3
    wait_until(lambda: 3 in tried)
    plans.close()


def test_a_client_that_cannot_write_by_a_plan_does_not_serve_it(gallery: Gallery) -> None:
    """A roll back by ψ has queries of v2 and records of v1."""
    plan = gallery.registry.plan("texts")
    old = replace(plan.legs[1], embedder="v2", write_with="v1")

    def load(version: str) -> TextEmbedder:
        if version == "v1":
            raise errors.ModelError("no v1 here")
        return TextEmbedder(version)

    with application(gallery, load) as client, pytest.raises(errors.ModelError, match="no v1 here"):
        client._loaded_models.prepare(replace(plan, legs=(plan.legs[0], old)))
