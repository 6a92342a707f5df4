"""What clients tell of their searches."""

from __future__ import annotations

import time

from rmvdb.registry import Registry
from rmvdb.tables import GalleryRow
from tests.support.photos import TIMES, add_gallery


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


def test_what_a_client_said_of_its_searches_outlasts_a_late_heartbeat_and_not_its_window(registry: Registry) -> None:
    add_gallery(registry, times=TIMES | {"max_age": 0.1})
    registry.refresh("photos", client="silent", ready=1, trouble="", searches=100, p99_ms=900.0)
    time.sleep(0.3)

    assert registry.clients(registry.gallery("photos").id) == []
    assert registry.slowest_client("photos", enough=20, within=30.0) is not None
    assert registry.slowest_client("photos", enough=20, within=0.2) is None


def test_what_went_wrong_is_kept_in_whatever_words_it_was_said(registry: Registry, gallery: GalleryRow) -> None:
    registry.refresh("photos", client="c1", ready=1, trouble="no weights-\udce9.pt \0 " + "é" * 3000)
    (client,) = registry.clients(gallery.id)

    assert client.trouble == "no weights-?.pt \ufffd " + "é" * (2000 - 18)
