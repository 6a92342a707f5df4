"""The queries that people ask are asked of old before deploy and of new before cut-over, and the difference is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rmvdb import errors
from rmvdb.registry.kept_queries import AskedQuery
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import Phase
from tests.support.inprocess import Gallery, make


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Forty texts at v1; an upgrade to v2 that is not deployed."""
    made = make(tmp_path, deployed=False)
    yield made
    made.registry.close()


def keep(gallery: Gallery, ids: Sequence[int]) -> None:
    asked = [AskedQuery(priority=id / 100, kind="text", payload=f"t{id}".encode(), age=0.0) for id in ids]
    gallery.registry.keep_queries("texts", asked, most=100, days=30.0)


def upgraded(gallery: Gallery) -> tuple[UpgradeRow, list[str]]:
    """Upgrade to the end. Return the upgrade and what was said."""
    said, conductor = list[str](), gallery.conductor()
    conductor.say = said.append
    row = conductor.advance(gallery.registry.upgrade(gallery.upgrade.id), gallery.worker())
    assert row.phase == Phase.CUT_OVER
    return row, said


def kept_answers(gallery: Gallery, row: UpgradeRow) -> list[list[int]]:
    return list(json.loads((gallery.folder / "artifacts" / f"{row.plan.answered}.json").read_text()).values())


def test_kept_queries_are_asked_of_old_and_of_new(gallery: Gallery) -> None:
    keep(gallery, range(1, 6))
    row, said = upgraded(gallery)
    assert sorted(ids[0] for ids in kept_answers(gallery, row)) == [1, 2, 3, 4, 5]  # by v1, in the old collection
    (told,) = (words for words in said if "old and new share" in words)
    assert told.startswith("5 queries: old and new share ")
    assert told in [each.note for each in gallery.registry.history(row.id)]


def test_of_queries_with_answers_it_says_how_many_find_one(gallery: Gallery) -> None:
    file = gallery.folder / "queries.jsonl"
    judged = [{"item": f"t{id}", "answers": [id]} for id in range(1, 9)] + [{"item": "t9", "answers": [41]}]
    file.write_text("".join(f"{json.dumps(each)}\n" for each in judged))
    plan = replace(gallery.upgrade.plan, question={**gallery.upgrade.plan.question, "queries": str(file)})
    gallery.registry.set_upgrade(gallery.upgrade.id, plan=plan)
    keep(gallery, [20])  # those with answers come first
    said = upgraded(gallery)[1]
    (told,) = (words for words in said if "old and new share" in words)
    assert told.startswith("9 queries: ")
    assert told.endswith("; an answer is among them for 89% by old and 89% by new (+0% to +0%)")


def test_what_was_written_meanwhile_is_not_compared(gallery: Gallery) -> None:
    keep(gallery, [1])
    gallery.conductor().deploy(gallery.upgrade)
    with gallery.client() as client:
        client.upsert([{"id": id, "item": "another", "n": 1} for id in range(1, 41)])
    row, said = upgraded(gallery)
    assert row.plan.answered
    assert not [words for words in said if "old and new share" in words]  # nothing is left to compare


def test_without_queries_nothing_is_asked(gallery: Gallery) -> None:
    row, said = upgraded(gallery)
    assert row.plan.answered is None
    assert not [words for words in said if "old and new" in words]


@pytest.mark.parametrize("kind", [errors.ModelError, errors.ItemError, errors.EngineError])
def test_queries_that_cannot_be_asked_do_not_hold_up_the_upgrade(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, kind: type[errors.RmvdbError]
) -> None:
    keep(gallery, [1])

    def gone(*_: object) -> None:
        raise kind("v1 is gone")

    monkeypatch.setattr(gallery.loaded_models, "queries", gone)
    row, said = upgraded(gallery)
    assert row.plan.answered is None
    assert "old and new will not be compared by queries: v1 is gone" in said


def test_the_answers_of_old_are_kept_once(gallery: Gallery) -> None:
    """A deploy that is killed and done again keeps those of the first try."""
    keep(gallery, [1, 2])
    gallery.conductor().deploy(gallery.upgrade)
    first = gallery.registry.upgrade(gallery.upgrade.id).plan.answered
    gallery.registry.set_upgrade(gallery.upgrade.id, phase=Phase.PLANNED)
    gallery.conductor().deploy(gallery.registry.upgrade(gallery.upgrade.id))
    assert gallery.registry.upgrade(gallery.upgrade.id).plan.answered == first
