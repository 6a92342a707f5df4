"""Sentences of the command line, the history and the status agree with the serving plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rmvdb.types import Phase
from rmvdb.upgrade.status import searched, status
from tests.support.inprocess import TIMES, Gallery, drive, make


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    made = make(tmp_path, times=TIMES | {"max_age": 0.5})
    yield made
    made.registry.close()


def doing(gallery: Gallery) -> str:
    return status(gallery.registry, gallery.registry.gallery("texts")).doing


def test_a_roll_back_that_leaves_two_collections_in_service_names_both(gallery: Gallery) -> None:
    """v3 took the place of v1 → v2 half way and is rolled back: records lie in v2 and v1 again."""
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    gallery.supersede()
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    conductor, said = gallery.conductor(), list[str]()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    conductor.say = said.append
    row = conductor.advance(back, gallery.worker())
    both = "texts_v2 and texts_v1 are searched"
    assert row.phase == Phase.CUT_OVER
    assert searched(gallery.registry.plan("texts"), by_name=True) == both
    assert f"rolled back: 40 records verified, {both} now" in said
    assert doing(gallery) == f"{both}; rmvdb cleanup makes it final"
    assert gallery.registry.history(row.id)[-1].note == f"verified 40 records; {both}"


def test_after_the_last_clean_up_the_upgrade_that_ended_last_is_shown(gallery: Gallery) -> None:
    first = gallery.upgrade
    gallery.worker().run(gallery.task, gallery.backfill, until=0.5)
    gallery.supersede()
    conductor = gallery.conductor()
    back = conductor.roll_back(gallery.registry.upgrade(gallery.upgrade.id))
    assert back is not None
    conductor.clean_up(conductor.advance(back, gallery.worker()))
    row = conductor.advance(gallery.registry.upgrade(first.id), gallery.worker())
    conductor.clean_up(row)
    now = status(gallery.registry, gallery.registry.gallery("texts"))
    assert (now.upgrade, now.from_version, now.to_version, now.phase) == (first.id, "v1", "v2", Phase.ENDED)
    assert now.doing == "no upgrade is on; only texts_v2 is searched"


def test_forced_it_names_the_clients_whose_searches_fail(gallery: Gallery) -> None:
    drive(gallery)
    conductor, said, real = gallery.conductor(), list[str](), gallery.registry.announce

    def announce(*args: Any, **options: Any) -> int:
        gallery.registry.refresh("texts", client="web-7", ready=1, trouble="No module named v2", holds=2)
        return real(*args, **options)

    gallery.registry.announce = announce  # type: ignore[method-assign]
    conductor.say = said.append
    conductor.advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker(), force=True)
    forced = [each for each in said if each.startswith("forced: ")]
    fail = "forced: searches of these clients fail until they can serve epoch 3"
    assert forced == [f"{fail}: client web-7 cannot serve epoch 3 yet: No module named v2"]
