"""Two hundred applications beside an upgrade: they connect at once, the upgrade goes on, and each is served to its end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from rmvdb.registry.registry import Registry
from rmvdb.serving.client import Client
from rmvdb.types import Phase
from tests.support.inprocess import Gallery, make
from tests.support.waiting import wait_until

CLIENTS = 200
#: A client asks for its plan every three seconds. With the defaults it does every six.
TIMES = {"max_age": 5.0, "longest_search": 0.5, "staleness": 0.0}


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts at v1, and an upgrade to v2 that is not deployed."""
    made = make(tmp_path, deployed=False, times=TIMES)
    yield made
    made.registry.close()


def connected(gallery: Gallery, number: int) -> Client:
    """Return a client with a registry of its own, as an application in another process has."""
    registry = Registry(gallery.registry.url.render_as_string(hide_password=False), patience=60.0)
    return Client(
        "texts",
        registry=registry,
        store=gallery.store,
        loaded_models=gallery.loaded_models,
        engine_timeout=1.0,
        closing=registry.close,
    )


def test_an_upgrade_goes_on_beside_two_hundred_clients_that_connect_at_once(gallery: Gallery) -> None:
    with ExitStack() as clients, ThreadPoolExecutor(CLIENTS) as pool:
        every = [clients.enter_context(each) for each in pool.map(lambda number: connected(gallery, number), range(CLIENTS))]
        assert len(gallery.registry.clients(gallery.upgrade.gallery_id)) == CLIENTS
        row = gallery.conductor().advance(gallery.upgrade, gallery.worker())
        assert row.phase == Phase.CUT_OVER
        for client in every:
            wait_until(lambda client=client: [leg.model for leg in client.plan.legs] == ["v2"])  # type: ignore[misc]
            assert {hit.id for hit in client.search("t3", limit=40)} == set(gallery.source.of)
