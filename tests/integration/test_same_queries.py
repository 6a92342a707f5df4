"""The queries that people ask are asked of old before deploy and of new before cut-over, and the difference is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmvdb import errors
from rmvdb.registry.kept_queries import AskedQuery
from rmvdb.registry.tables import UpgradeRow
from rmvdb.types import Item, Phase, ServingPlan
from rmvdb.upgrade import deploy
from tests.support.inprocess import Crash, Gallery, make, vector


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


def answers_of_old(gallery: Gallery) -> list[list[int]]:
    """Return the hits that a deployed upgrade keeps."""
    sha256 = gallery.registry.upgrade(gallery.upgrade.id).plan.answered
    return list(json.loads((gallery.folder / "artifacts" / f"{sha256}.json").read_text())["hits"].values())


def test_kept_queries_are_asked_of_old_and_of_new(gallery: Gallery) -> None:
    keep(gallery, range(1, 6))
    gallery.conductor().deploy(gallery.upgrade)
    before = answers_of_old(gallery)
    assert sorted(ids[0] for ids in before) == [1, 2, 3, 4, 5]  # by v1, in the old collection
    keep(gallery, range(6, 40))  # others take nobody's place: the very same are asked
    row, said = upgraded(gallery)
    with gallery.client() as client:
        after = [[hit.id for hit in client.search(f"t{ids[0]}", limit=10)] for ids in before]
    share = sum(len({*old[:10]} & {*new}) for old, new in zip(before, after, strict=True)) / 50
    (told,) = (words for words in said if "old and new share" in words)
    assert told == f"5 queries: old and new share {share:.0%} of the first 10 hits"
    assert 0 < share < 1
    assert [each.phase for each in gallery.registry.history(row.id) if told in each.note] == [Phase.CUT_OVER]
    (served,) = (at for at, words in enumerate(said) if words.startswith("cut over: "))
    assert said.index(told) < served
    assert row.plan.answered is None  # nothing of the queries stays


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
    assert answers_of_old(gallery)
    said = upgraded(gallery)[1]
    assert not [words for words in said if "old and new share" in words]  # nothing is left to compare


def test_records_that_were_written_meanwhile_take_no_others_place(gallery: Gallery) -> None:
    keep(gallery, [1])
    gallery.conductor().deploy(gallery.upgrade)
    with gallery.client() as client:
        client.upsert([{"id": id, "item": "t1", "n": 1} for id in range(100, 108)])  # the nearest from now on
    said = upgraded(gallery)[1]
    with gallery.client() as client:
        after = [hit.id for hit in client.search("t1", limit=18) if hit.id < 100][:10]
        before = sorted(gallery.source.of, key=lambda id: float(np.square(vector("v1", f"t{id}") - vector("v1", "t1")).sum()))
    share = len({*before[:10]} & {*after}) / 10
    assert [words for words in said if "share" in words] == [f"1 query: old and new share {share:.0%} of the first 10 hits"]


def test_without_queries_nothing_is_asked(gallery: Gallery) -> None:
    row, said = upgraded(gallery)
    assert row.plan.answered is None
    assert not [words for words in said if "old and new" in words]


@pytest.mark.parametrize("kind", [errors.ModelError, errors.ItemError, errors.EngineError, errors.ConfigError])
@pytest.mark.parametrize("asked", ["of old", "of new"])
def test_queries_that_cannot_be_asked_do_not_hold_up_the_upgrade(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, kind: type[errors.RmvdbError], asked: str
) -> None:
    keep(gallery, [1])
    if asked == "of new":
        gallery.conductor().deploy(gallery.upgrade)

    def gone(*_: object) -> None:
        raise kind("it is gone")

    monkeypatch.setattr(gallery.loaded_models, "queries", gone)
    row, said = upgraded(gallery)
    assert row.plan.answered is None
    how = "will not" if asked == "of old" else "could not"
    assert f"old and new {how} be compared by queries: it is gone" in said


def test_a_query_that_cannot_be_embedded_is_left_out(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(gallery, [1, 2, 3])
    real = gallery.loaded_models.queries

    def queries(plan: ServingPlan, items: Sequence[Item], embedded: Any) -> Any:
        if "t2" in items:
            raise errors.ItemError("no text", at=list(items).index("t2"))
        return real(plan, items, embedded)

    monkeypatch.setattr(gallery.loaded_models, "queries", queries)
    gallery.conductor().deploy(gallery.upgrade)
    assert [ids[0] for ids in answers_of_old(gallery)] == [1, 3]


def test_a_file_of_queries_that_has_changed_is_not_compared(gallery: Gallery) -> None:
    file = gallery.folder / "queries.jsonl"
    file.write_text('{"item": "t1", "answers": [1]}\n')
    plan = replace(gallery.upgrade.plan, question={**gallery.upgrade.plan.question, "queries": str(file)})
    gallery.registry.set_upgrade(gallery.upgrade.id, plan=plan)
    gallery.conductor().deploy(gallery.registry.upgrade(gallery.upgrade.id))
    assert len(answers_of_old(gallery)) == 1
    file.write_text('{"item": "t2", "answers": [2]}\n')
    assert "old and new could not be compared by queries: the file of queries has changed" in upgraded(gallery)[1]


def test_a_worker_that_stays_does_not_load_the_old_model_for_this(gallery: Gallery) -> None:
    keep(gallery, [1])
    worker = gallery.worker()
    worker.patient = False
    conductor = gallery.conductor()
    assert conductor.advance(gallery.upgrade, worker).phase == Phase.CUT_OVER
    assert not gallery.registry.artifacts()


def test_the_answers_of_an_upgrade_that_is_given_up_are_garbage(gallery: Gallery) -> None:
    keep(gallery, [1])
    gallery.conductor().deploy(gallery.upgrade)
    sha256 = gallery.registry.upgrade(gallery.upgrade.id).plan.answered
    assert sha256 in gallery.registry.artifacts_in_use()
    gallery.registry.end(gallery.upgrade.id, note="given up")
    assert sha256 not in gallery.registry.artifacts_in_use()


def test_the_answers_of_old_are_kept_once(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deploy that is killed before the epoch changes, and done again, keeps those of the first try."""
    keep(gallery, [1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(deploy.change_epoch, "serve", crash)
        with pytest.raises(Crash):
            gallery.conductor().deploy(gallery.upgrade)
    first = answers_of_old(gallery)
    gallery.store.delete("texts_v1", [1])
    gallery.conductor().deploy(gallery.registry.upgrade(gallery.upgrade.id))
    assert answers_of_old(gallery) == first


def crash(*_: object, **__: object) -> None:
    raise Crash("before the epoch changes")
