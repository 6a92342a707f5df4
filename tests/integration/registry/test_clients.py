"""The reports of clients about their searches."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import text

from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow
from tests.support.photos import TIMES, add_gallery
from tests.support.waiting import fall_silent


def test_the_slowest_client_is_one_that_lives_and_has_searched_enough(registry: Registry, gallery: GalleryRow) -> None:
    add_gallery(registry, "pictures")
    for name, client, searches, p99_ms in (
        ("photos", "fast", 500, 12.0),
        ("photos", "slow", 20, 180.5),
        ("photos", "seldom", 19, 900.0),
        ("photos", "left", 500, 900.0),
        ("pictures", "elsewhere", 500, 900.0),
    ):
        registry.refresh(name, client=client, ready=1, trouble="", searches=searches, p99_ms=p99_ms)
    registry.leave("left")
    slowest = registry.slowest_client("photos", enough=20, within=30)
    registry.refresh("photos", client="slow", ready=1, trouble="")
    then = registry.slowest_client("photos", enough=20, within=30)

    assert slowest is not None
    assert (slowest.id, slowest.searches, slowest.p99_ms) == ("slow", 20, 180.5)
    assert then is not None
    assert then.id == "fast"


def test_the_figures_of_a_clients_searches_outlast_a_late_heartbeat_and_not_its_window(registry: Registry) -> None:
    add_gallery(registry, times=TIMES | {"max_age": 0.1})
    registry.refresh("photos", client="silent", ready=1, trouble="", searches=100, p99_ms=900.0)
    time.sleep(0.3)

    assert registry.clients(registry.gallery("photos").id) == []
    assert registry.slowest_client("photos", enough=20, within=30.0) is not None
    assert registry.slowest_client("photos", enough=20, within=0.2) is None


def test_an_error_is_kept_in_any_words(registry: Registry, gallery: GalleryRow) -> None:
    registry.refresh("photos", client="c1", ready=1, trouble="no weights-\udce9.pt \0 " + "é" * 3000)
    (client,) = registry.clients(gallery.id)

    assert client.trouble == "no weights-?.pt \ufffd " + "é" * (2000 - 18)


def known(registry: Registry) -> set[str]:
    """Return the clients that have a row in the registry."""
    with registry.engine.begin() as connection:
        return set(connection.scalars(text("SELECT id FROM clients")))


def test_a_client_that_ended_without_a_word_is_forgotten_when_another_comes(registry: Registry, gallery: GalleryRow) -> None:
    add_gallery(registry, "pictures")
    for client in ("killed", "suspended", "late", "elsewhere"):
        registry.refresh("pictures" if client == "elsewhere" else "photos", client=client, ready=1, trouble="")
    for client, seconds in (("killed", 86_500.0), ("suspended", 86_500.0), ("late", 86_000.0), ("elsewhere", 86_500.0)):
        fall_silent(registry, client, seconds=seconds)
    registry.refresh("photos", client="late", ready=1, trouble="")
    before = known(registry)
    registry.refresh("photos", client="new", ready=1, trouble="")
    after = known(registry)
    registry.refresh("photos", client="suspended", ready=1, trouble="", holds=1)

    assert before == {"killed", "suspended", "late", "elsewhere"}
    assert after == {"late", "elsewhere", "new"}
    assert {row.id for row in registry.clients(gallery.id)} == {"late", "new", "suspended"}


@pytest.mark.parametrize(("age", "counts"), [(200_000.0, True), (100_000.0, False)])
def test_no_client_is_forgotten_that_an_epoch_still_waits_for(registry: Registry, age: float, counts: bool) -> None:
    gallery = add_gallery(registry, times=TIMES | {"max_age": age})
    registry.refresh("photos", client="slow", ready=1, trouble="")
    fall_silent(registry, "slow", seconds=150_000.0)
    registry.refresh("photos", client="new", ready=1, trouble="")

    assert ("slow" in {row.id for row in registry.clients(gallery.id)}) is counts
    assert "slow" in known(registry)
    fall_silent(registry, "slow", seconds=150_000.0)
    registry.refresh("photos", client="newer", ready=1, trouble="")

    assert known(registry) == {"new", "newer"}


def test_a_client_that_outlives_its_gallery_does_not_make_the_next_one_of_its_name_look_old(
    registry: Registry, gallery: GalleryRow
) -> None:
    told = registry.refresh("photos", client="c", ready=1, trouble="")
    registry.leave("c")
    registry.remove_gallery("photos")
    add_gallery(registry)
    registry.refresh("photos", client="c", ready=5, trouble="", holds=5, added=told.added)
    assert registry.trace("photos").reported == 0

    now = registry.refresh("photos", client="d", ready=1, trouble="")
    registry.refresh("photos", client="c", ready=5, trouble="", holds=5, added=now.added)
    assert registry.trace("photos").reported == 5
