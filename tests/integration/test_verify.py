"""The comparison before cut-over: what it goes on from, what it reads, and what is no difference."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from rmvdb import errors
from rmvdb.engines.finding import not_found
from rmvdb.protocols import always
from rmvdb.registry.codec import schema_from_json, unpack_ids
from rmvdb.registry.tables import UpgradeRow
from rmvdb.serving import sketch
from rmvdb.serving.client import Client
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.types import BatchState, Id, Index, Item, Phase, Record, Vectors
from rmvdb.upgrade import verify
from rmvdb.upgrade.moved_batches import MovedBatches
from rmvdb.upgrade.report import VerifyPosition
from rmvdb.upgrade.status import status
from tests.support.faults import once
from tests.support.inprocess import Gallery, TextEmbedder, drive, make, vector


@pytest.fixture
def gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gallery]:
    """Forty texts in batches of ten, all of them moved; a batch is compared at a time."""
    monkeypatch.setattr("rmvdb.upgrade.compare.AT_ONCE", 10)
    made = make(tmp_path)
    made.worker().run(made.task, made.backfill)
    yield made
    made.registry.close()


@pytest.mark.parametrize("moment", ["written", "copied", "retired"])
def test_a_batch_under_way_is_not_a_difference(tmp_path: Path, moment: str) -> None:
    """As after Ctrl-C, or while workers go on."""
    made = make(tmp_path, records=20)
    batch = made.registry.claim(made.upgrade.id, "w", lease=60.0, grace=0.0, copy=True)
    assert batch is not None
    reports = []
    if moment == "written":
        made.store.after = once("upsert", made.task.new[0], lambda: reports.append(made.verify()))
    made.backfill.copy(made.task, batch, always)
    if moment == "copied":
        reports.append(made.verify())
    elif moment == "retired":

        def scanned(*_: object) -> None:
            made.registry.batches = real  # type: ignore[method-assign]
            drive(made)

        real = made.registry.batches
        made.registry.batches = lambda *args, **options: (real(*args, **options), scanned())[0]  # type: ignore[method-assign]
        reports.append(made.verify())
    assert [(report.ok, report.examples) for report in reports] == [(True, [])]
    made.store.upsert(made.task.new[0], [Record(id=99, vector=vector("v2", "t99"), fields={})])
    assert made.verify().examples == ["record 99 is in texts_v2 though it was neither moved nor written there"]
    made.registry.close()


def test_a_batch_that_advances_during_the_look_is_found_in_one_state_or_the_next(tmp_path: Path) -> None:
    made = make(tmp_path, records=10)
    batch = made.registry.claim(made.upgrade.id, "w", lease=60.0, grace=0.0, copy=True)
    assert batch is not None
    states = iter([BatchState.WRITING, BatchState.COPIED, BatchState.REMOVING])
    real = made.registry.batches

    def batches(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        if (state := next(states, None)) is not None:
            with made.registry.engine.begin() as connection:
                connection.execute(
                    text("UPDATE batches SET state = :state WHERE id = :id"), {"state": state.value, "id": batch.id}
                )
        return found

    made.registry.batches = batches  # type: ignore[method-assign]
    hashes = MovedBatches(made.registry, made.archive).under_way(made.task, [])
    assert len(set(hashes.tolist())) == 10
    made.registry.close()


def test_nothing_can_be_compared_of_an_upgrade_that_is_planned(tmp_path: Path) -> None:
    made = make(tmp_path, deployed=False)
    made.store.drop("texts_v2")
    with pytest.raises(errors.WrongPhase, match="The upgrade is planned: there is nothing to compare yet"):
        made.verify()
    made.registry.close()


def row(gallery: Gallery) -> UpgradeRow:
    return gallery.registry.upgrade(gallery.upgrade.id)


def interrupted(gallery: Gallery, *, after: int) -> None:
    """Stop a cut-over once so many parts are compared."""
    conductor = gallery.conductor()
    parts = []

    def report(what: str, done: int, total: int) -> None:
        if what == "verifying":
            parts.append(done)
            if len(parts) == after:
                conductor.stop.set()

    conductor.report = report
    with pytest.raises(errors.Stopped):
        conductor.cut_over(row(gallery), gallery.worker())


@contextmanager
def third_version(gallery: Gallery) -> Iterator[None]:
    """Supersede the upgrade, take every record out of its collections, and roll back: the upgrade goes on."""
    first, task = gallery.upgrade, gallery.task
    gallery.supersede()
    yield
    conductor = gallery.conductor()
    conductor.backfill(row(gallery), gallery.worker())
    back = conductor.roll_back(row(gallery))
    assert back is not None
    conductor.clean_up(conductor.advance(back, gallery.worker()))
    gallery.upgrade, gallery.task = first, task


def read(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many records each file that is read from now on holds."""
    files: list[int] = []
    real = gallery.archive.found

    def reading(file: Any, **options: Any) -> Any:
        found = real(file, **options)
        files.append(len(found))
        return found

    monkeypatch.setattr(gallery.archive, "found", reading)
    return files


def test_it_goes_on_where_it_was_interrupted(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(gallery, after=3)
    found = status(gallery.registry, gallery.registry.gallery("texts")).to_json()
    assert found["doing"] == "every listed record is moved; 30 of 40 records verified"
    files, said = read(gallery, monkeypatch), list[str]()
    conductor = gallery.conductor()
    conductor.say = said.append
    conductor.cut_over(row(gallery), gallery.worker())
    assert row(gallery).phase == Phase.CUT_OVER
    assert files == [10]
    assert "verifying, from where it stood" in said
    assert gallery.conductor().verify(row(gallery)).embedded_again == 40  # who asks by hand has all compared


def test_a_batch_that_was_moved_since_is_compared_too(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(gallery, after=4)
    gallery.source.of[90] = "late"
    gallery.store.upsert(gallery.task.old[0], [Record(id=90, vector=vector("v1", "late"), fields={"n": 90})])
    files = read(gallery, monkeypatch)
    gallery.conductor().cut_over(row(gallery), gallery.worker())
    assert row(gallery).phase == Phase.CUT_OVER
    assert files[-1] == 1
    gallery.expect_moved()


def test_all_of_it_is_compared_again_after_a_difference(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(gallery, after=2)
    new = gallery.task.new[0]
    good = next(iter(gallery.store.get(new, [40], vector=True)))
    gallery.store.delete(new, [40])
    with pytest.raises(errors.VerifyFailed, match="40"):
        gallery.conductor().cut_over(row(gallery), gallery.worker())
    assert row(gallery).verifying is None
    gallery.store.upsert(new, [good])
    files = read(gallery, monkeypatch)
    gallery.conductor().cut_over(row(gallery), gallery.worker())
    assert files == [10, 10, 10, 10]


def test_a_difference_that_was_seen_before_an_interruption_is_not_forgotten(gallery: Gallery) -> None:
    first = gallery.registry.batches(gallery.upgrade.id)[0]
    gallery.store.delete(gallery.task.new[0], unpack_ids(first.remove)[:1])
    interrupted(gallery, after=2)
    assert row(gallery).verifying is None
    with pytest.raises(errors.VerifyFailed, match="was moved and is not in"):
        gallery.conductor().cut_over(row(gallery), gallery.worker())


def test_a_conductor_that_was_overtaken_does_not_say_how_far_it_is(gallery: Gallery) -> None:
    first = gallery.conductor()
    first.leader_token = gallery.registry.lead(gallery.upgrade.id, "first", 0.001)
    gallery.registry.lead(gallery.upgrade.id, "second", 30.0)
    with pytest.raises(errors.UpgradeRunning):
        verify.expect_verified(first, row(gallery))
    assert row(gallery).verifying is None


def test_a_position_counts_only_while_the_same_batches_lie_behind_it(gallery: Gallery) -> None:
    ids = [batch.id for batch in gallery.registry.batches(gallery.upgrade.id)]
    there = VerifyPosition(batch=ids[1], batches=2, fields_compared=20, embedded_again=20)
    other = VerifyPosition(batch=ids[1], batches=1, fields_compared=10, embedded_again=10)
    assert verify_from(gallery, there) == 2
    assert verify_from(gallery, other) == 4


def verify_from(gallery: Gallery, begun: VerifyPosition) -> int:
    """Return how many parts are compared."""
    parts = list[VerifyPosition]()
    report = verify._compare(gallery.conductor(), row(gallery), begun=begun, keep=parts.append)
    assert report.ok
    assert report.fields_compared == 40
    return len(parts)


def test_a_record_that_another_program_put_back_with_other_fields_is_moved_again(gallery: Gallery) -> None:
    """It was moved twice; the last reading counts."""
    gallery.source.of[7] = "newer"
    gallery.store.upsert(gallery.task.old[0], [Record(id=7, vector=vector("v1", "newer"), fields={"n": 99})])
    found = gallery.conductor().advance(row(gallery), gallery.worker())
    assert found.phase == Phase.CUT_OVER
    gallery.expect_moved()
    assert gallery.held()["new"][7].fields["n"] == 99


def test_only_what_is_embedded_again_is_read_with_its_vector(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    with_vectors: list[bool] = []
    real = gallery.store.get

    def get(*args: Any, **options: Any) -> Any:
        with_vectors.extend([options.get("vector", False)] * len(args[1]))
        return real(*args, **options)

    monkeypatch.setattr(gallery.store, "get", get)
    report = gallery.conductor().verify(row(gallery), sample=10)
    assert report.ok
    assert sum(with_vectors) == report.embedded_again < 40
    assert with_vectors.count(False) == 40


def test_a_record_that_cannot_be_embedded_again_is_named_and_is_no_difference(gallery: Gallery) -> None:
    gallery.source.of[3] = "broken"
    report = gallery.conductor().verify(row(gallery), sample=40)
    assert report.ok
    assert report.unread == ["record 3 cannot be embedded again, so its vector was not compared: ValueError: broken"]


@pytest.mark.parametrize("fit", [3, 0])
def test_items_that_do_not_fit_into_memory_together_are_embedded_again_in_smaller_parts(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, fit: int
) -> None:
    real = gallery.source.load

    def load(records: Sequence[Record]) -> Any:
        if len(records) > fit:
            raise MemoryError
        return real(records)

    monkeypatch.setattr(gallery.source, "load", load)
    conductor = gallery.conductor()
    if fit:
        report = conductor.verify(row(gallery), sample=40)
        assert report.ok
        assert report.embedded_again == 40
    else:
        with pytest.raises(errors.SourceError, match=r"does not fit into memory; .* make backfill.batch smaller"):
            conductor.verify(row(gallery), sample=40)


def test_searches_are_asked_for_what_clients_wrote_too(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery.source.of[99] = "inserted"
    with gallery.client() as client:
        client.upsert([{"id": 99, "item": "inserted", "n": 1}])
    assert gallery.conductor().verify(row(gallery), sample=100).ok
    real = gallery.store.search

    def search(*args: Any, **options: Any) -> Any:
        return [[hit for hit in hits if hit.id != 99] for hits in real(*args, **options)]

    monkeypatch.setattr(gallery.store, "search", search)
    report = gallery.conductor().verify(row(gallery), sample=100)
    assert report.examples == [
        "record 99 is in texts_v2, and a search with a filter by its key does not find it; look at its index"
    ]


def passing_over(monkeypatch: pytest.MonkeyPatch, gallery: Gallery, few: Collection[Id], index: str = "HNSW") -> None:
    """Let searches without a filter find farther records than these, as an approximate index does."""
    real = gallery.store.search

    def search(*args: Any, limit: int, **options: Any) -> Any:
        found = real(*args, limit=limit + len(few), **options)
        hidden = () if options.get("filter") else few
        return [[hit for hit in hits if hit.id not in hidden][:limit] for hits in found]

    monkeypatch.setattr(gallery.store, "search", search)
    monkeypatch.setattr(gallery.store, "index", lambda collection: Index(type=index))


@pytest.mark.parametrize(("passed_over", "differ"), [(2, 0), (3, 3)])
def test_an_approximate_index_may_pass_over_one_record_in_twenty_that_a_filter_finds(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, passed_over: int, differ: int
) -> None:
    """HNSW did so with 15 of 998 records if asked for 10 hits, and still with 6 if asked for 1,000."""
    few = list(gallery.source.of)[:passed_over]
    passing_over(monkeypatch, gallery, few)
    report = gallery.conductor().verify(row(gallery), sample=40)
    assert (report.searched, report.passed_over, report.problems) == (40, passed_over, differ)
    assert report.approximation == f"the index is approximate: searches by their own vectors miss {passed_over} records of 40"
    if differ:
        assert f"record {few[0]} is in texts_v2, and a search by its own vector does not find it" in report.examples[0]


@pytest.mark.parametrize("index", ["FLAT", "IVF_FLAT"])
def test_an_index_that_reads_every_list_may_pass_over_none(gallery: Gallery, monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    passing_over(monkeypatch, gallery, [7], index)
    report = gallery.conductor().verify(row(gallery), sample=40)
    assert report.examples == ["record 7 is in texts_v2, and a search by its own vector does not find it; look at its index"]


def test_what_an_index_passes_over_is_counted_across_an_interruption(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of forty, two of them before it: each part alone would pass."""
    few = [list(gallery.source.of)[at] for at in (0, 11, 31)]
    passing_over(monkeypatch, gallery, few)
    whole, parts = row(gallery), list[VerifyPosition]()
    verify._compare(gallery.conductor(), whole, keep=parts.append)
    report = verify._compare(gallery.conductor(), whole, begun=parts[1], keep=lambda _: None)
    assert (report.searched, report.passed_over, report.problems) == (40, 3, 3)


def test_a_vector_without_a_direction_is_not_missed_by_a_search_that_can_never_find_it(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server stores one, and a search by the cosine never finds it. A roll back puts back those of an old gallery."""
    shape = schema_from_json(gallery.registry.collection("texts_v2").schema)
    records = [replace(each, fields={"n": 7}) for each in gallery.store.get("texts_v2", [1, 2, 3], vector=True)]
    records[1] = replace(records[1], vector=np.zeros(shape.dim, np.float32))
    gallery.store.upsert("texts_v2", records, as_read=True)
    real = gallery.store.search

    def search(*args: Any, **options: Any) -> Any:
        return [[hit for hit in hits if hit.id != 2] for hits in real(*args, **options)]

    monkeypatch.setattr(gallery.store, "search", search)
    assert not any(not_found(gallery.store, shape, records, among=[1, 2, 3]))
    monkeypatch.setattr(gallery.store, "search", lambda *args, **options: [hits[:0] for hits in search(*args, **options)])
    assert set(not_found(gallery.store, shape, records, among=[1, 2, 3]).hidden) == {1, 3}


def test_nothing_is_asked_of_an_index_that_is_not_known(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = schema_from_json(gallery.registry.collection("texts_v2").schema)
    records = gallery.store.get("texts_v2", [1, 2], vector=True)
    monkeypatch.setattr(gallery.store, "index", lambda collection: Index(type="IVF_RABITQ"))
    monkeypatch.setattr(gallery.store, "search", None)
    assert not any(not_found(gallery.store, shape, records))


def test_a_filter_by_a_field_finds_as_many_as_there_are(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    with gallery.client() as client:
        client.upsert([{"id": id, "item": f"t{id}", "n": 7} for id in (1, 2, 3)])
    records = gallery.store.get("texts_v2", [1], vector=True)
    shape = schema_from_json(gallery.registry.collection("texts_v2").schema)
    assert not any(not_found(gallery.store, shape, records))
    real = gallery.store.search

    def search(*args: Any, **options: Any) -> Any:
        return [[hit for hit in hits if hit.id == 1] for hits in real(*args, **options)]

    monkeypatch.setattr(gallery.store, "search", search)
    missed = not_found(gallery.store, shape, records)
    assert missed == ({1: "a search with the filter 'n == 7' finds 1 of 3 records"}, {})


def test_the_cut_over_waits_until_searches_find_all_there_is(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[tuple[str, int]] = []
    monkeypatch.setattr(
        gallery.store, "settle", lambda name, *, coming, missed, report: (settled.append((name, coming)), report(3, 9))
    )
    told: list[tuple[str, int, int]] = []
    conductor = gallery.conductor()
    conductor.report = lambda *words: told.append(words)  # type: ignore[method-assign,assignment]
    conductor.advance(row(gallery), gallery.worker())
    assert settled == [("texts_v2", 0)]
    assert ("indexing texts_v2", 3, 9) in told
    assert row(gallery).phase == Phase.CUT_OVER


def test_a_gallery_of_nothing_is_verified(tmp_path: Path) -> None:
    empty = make(tmp_path, records=0)
    found = empty.conductor().advance(row(empty), empty.worker())
    assert found.phase == Phase.CUT_OVER
    empty.registry.close()


def test_nothing_that_was_compared_before_a_third_version_counts_after_it(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took every record out of this collection, and a roll back put them there again."""
    interrupted(gallery, after=3)
    with third_version(gallery):
        pass
    assert row(gallery).phase == Phase.SERVING_BOTH
    assert row(gallery).verifying is None
    gallery.store.upsert("texts_v2", [Record(id=1, vector=vector("v2", "t1"), fields={"n": 99})])
    with pytest.raises(errors.VerifyFailed, match="other fields"):
        gallery.conductor().advance(row(gallery), gallery.worker())


def test_an_old_comparison_is_made_again(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(gallery, after=3)
    monkeypatch.setattr("rmvdb.upgrade.verify.COUNTS", 0.0)
    files = read(gallery, monkeypatch)
    gallery.conductor().cut_over(row(gallery), gallery.worker())
    assert files == [10, 10, 10, 10]


def test_a_comparison_that_found_a_difference_does_not_count_for_the_next(gallery: Gallery) -> None:
    interrupted(gallery, after=3)
    compared = unpack_ids(gallery.registry.batches(gallery.upgrade.id)[0].remove)[0]
    gallery.store.upsert("texts_v2", [Record(id=compared, vector=vector("v2", f"t{compared}"), fields={"n": 99})])
    assert not gallery.verify().ok
    with pytest.raises(errors.VerifyFailed, match="other fields"):
        gallery.conductor().cut_over(row(gallery), gallery.worker())


def test_a_change_by_another_program_under_a_third_version_is_not_a_difference_to_an_earlier_write(gallery: Gallery) -> None:
    with gallery.client() as client:
        gallery.source.of[5] = "written"
        client.upsert([{"id": 5, "item": "written", "n": 0}])
    with third_version(gallery):
        gallery.source.of[5] = "changed"
        gallery.store.upsert("texts_v2", [Record(id=5, vector=vector("v2", "changed"), fields={"n": 5})])
    assert gallery.conductor().advance(row(gallery), gallery.worker()).phase == Phase.CUT_OVER
    assert gallery.held()["new"][5].fields == {"n": 5}


def test_a_write_whose_intent_clean_up_has_forgotten_is_done_all_the_same(gallery: Gallery) -> None:
    opened = gallery.registry.open_intents("texts", "upsert", [5], client="one#1", lasting=30.0)
    assert opened is not None
    with gallery.registry.engine.begin() as connection:
        connection.execute(text("DELETE FROM intents"))
    assert gallery.registry.close_intents(opened, {opened.intents[0]: sketch.of(vector("v2", "t5"))})


def test_a_sketch_tells_vectors_apart_and_not_roundings() -> None:
    one = vector("v2", "one")
    assert sketch.near(sketch.of(one), sketch.of(3.0 * one + 1e-6))
    assert not any(sketch.near(sketch.of(one), sketch.of(vector("v2", str(other)))) for other in range(500))
    assert sketch.near(sketch.of(0.0 * one), sketch.of(0.0 * one))


@pytest.mark.parametrize("source", ["the same", "another"])
def test_a_record_that_a_client_wrote_by_other_code_of_the_model_is_embedded_again(tmp_path: Path, source: str) -> None:
    """Of another item than was written, which the source may have got since, nothing can be said."""
    made = make(tmp_path)
    other = LoadedModels(
        load_embedder=lambda version: _Turned(version),
        load_chain=made.loaded_models.chain,
        load_artifact=lambda sha256: b"",
    )
    with Client("texts", registry=made.registry, store=made.store, loaded_models=other, engine_timeout=1.0) as client:
        client.upsert([{"id": id, "item": f"t{id}", "n": 0} for id in (3, 7)])
    drive(made)
    if source == "another":
        made.source.of |= {3: "three", 7: "seven"}

    report = made.verify()

    complaints = [f"record {id} lies" for id in (3, 7)] if source == "the same" else []
    assert [each.split(" 2.0")[0] for each in report.examples] == complaints
    made.registry.close()


class _Turned(TextEmbedder):
    """The same model with its items prepared in another way."""

    def embed(self, items: Sequence[Item]) -> Vectors:
        return -super().embed(items)


def test_a_former_record_that_a_server_shows_for_a_moment_is_no_difference(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(gallery)
    real, former = gallery.store.get, iter(range(3))

    def get(collection: str, ids: Sequence[Id], **options: Any) -> list[Record]:
        found = real(collection, ids, **options)
        if (
            collection == "texts_v2"
            and not options.get("vector")
            and any(each.fields for each in found)
            and next(former, None) is not None
        ):
            return [replace(each, fields={"n": 99}) if each.id == 7 else each for each in found]
        return found

    monkeypatch.setattr(gallery.store, "get", get)
    assert gallery.verify().ok
    assert next(former, None) is None  # it was shown, and looked at again
