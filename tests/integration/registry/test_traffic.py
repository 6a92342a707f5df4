"""How often each record is found, of all clients together."""

from __future__ import annotations

import threading
import time

import pytest

from rmvdb.registry import traffic
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow
from tests.support.photos import add_gallery


def test_counts_of_all_clients_add_up_and_of_one_gallery_only(registry: Registry, gallery: GalleryRow) -> None:
    other = add_gallery(registry, "other")
    registry.add_traffic("photos", {1: 2, 2: 1})
    registry.add_traffic("photos", {2: 4, "a'b\n": 1})
    registry.add_traffic("other", {1: 7})
    known = registry.traffic(gallery.id)

    assert sorted(known, key=known.__getitem__) == ["a'b\n", "1", "2"]
    assert known["2"] == pytest.approx(5 * known["a'b\n"], rel=1e-4)
    assert list(registry.traffic(other.id)) == ["1"]


def test_only_so_many_records_are_kept_the_most_found_ones(
    registry: Registry, gallery: GalleryRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "MOST_FOUND", 100)
    for start in range(0, 600, 60):
        registry.add_traffic("photos", dict.fromkeys(range(start, start + 60), 1) | dict.fromkeys(range(1000, 1020), 5))
        assert len(registry.traffic(gallery.id)) <= 100
    known = registry.traffic(gallery.id)

    assert len(known) >= 90
    assert {str(id) for id in range(1000, 1020)} <= set(known)
    assert not {str(id) for id in range(60)} & set(known)  # of two that were found once the older one goes


def test_what_was_found_long_ago_weighs_less(registry: Registry, gallery: GalleryRow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "HALF_LIFE", 0.1)
    monkeypatch.setattr(traffic, "FADING_SINCE", registry.now())
    registry.add_traffic("photos", {1: 20, 2: 1})
    time.sleep(0.8)
    registry.add_traffic("photos", {3: 1})
    known = registry.traffic(gallery.id)

    assert known["3"] > known["1"] > known["2"]


def test_clients_that_tell_at_once_neither_wait_for_each_other_nor_lose_a_count(registry: Registry, gallery: GalleryRow) -> None:
    def tell(number: int) -> None:
        for turn in range(5):
            ids = range(200) if (number + turn) % 2 else reversed(range(200))
            registry.add_traffic("photos", dict.fromkeys(ids, 1))

    threads = [threading.Thread(target=tell, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    weights = registry.traffic(gallery.id)
    registry.add_traffic("photos", {"one": 1})

    assert len(weights) == 200
    assert min(weights.values()) == pytest.approx(20 * registry.traffic(gallery.id)["one"], rel=1e-4)
