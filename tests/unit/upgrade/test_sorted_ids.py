"""Least sure first, every record once, in bounded memory."""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest

from rmvdb.errors import ArtifactError, DiskFull
from rmvdb.planning.orders.centroid import Centroid
from rmvdb.planning.orders.random import Random
from rmvdb.types import Record
from rmvdb.upgrade import sorted_ids
from rmvdb.upgrade.sorted_ids import batches_in_order


@dataclass
class Shelf:
    """A store of one collection that can be scanned and counted; it remembers which fields were asked for."""

    records: list[Record]
    asked: list[tuple[str, ...]] = field(default_factory=list)

    def scan(self, collection, *, vector=False, fields=(), page=7, **_):
        self.asked.append(tuple(fields))
        for start in range(0, len(self.records), page):
            yield self.records[start : start + page]

    def count(self, collection, **_):
        return len(self.records)


def records(n=50, *, words=False):
    return [
        Record(id=f"r\n{number:04}" if words else number, vector=np.eye(4)[number % 3], fields={"kind": number % 3})
        for number in range(n)
    ]


def nobody(ids):
    return set()


@pytest.mark.parametrize("words", [False, True], ids=["int ids", "str ids"])
@pytest.mark.parametrize(("run", "most_open"), [(1000, 8), (9, 256), (3, 2)], ids=["in memory", "one merge", "several merges"])
def test_batches_hold_every_record_once_in_ascending_confidence(tmp_path, monkeypatch, words, run, most_open):
    monkeypatch.setattr(sorted_ids, "RUN", run)
    monkeypatch.setattr(sorted_ids, "MOST_OPEN", most_open)
    some, order = records(50, words=words), Random(seed=1)
    out = {some[3].id, some[40].id}
    batches = list(batches_in_order(Shelf(some), "old", order, batch=8, folder=tmp_path, leave_out=lambda ids: out & set(ids)))
    confidence = dict(zip((record.id for record in some), order.confidence(some).tolist(), strict=True))
    assert [id for batch in batches for id in batch] == sorted(confidence.keys() - out, key=lambda id: (confidence[id], id))
    assert [len(batch) for batch in batches] == [8] * 6
    assert list(tmp_path.iterdir()) == []


def test_equal_confidences_go_by_id_and_unknown_ones_first(tmp_path):
    class Odd:
        def confidence(self, records):
            return np.array([np.nan if record.id == 4 else -np.inf if record.id == 2 else 0.5 for record in records], np.float32)

    assert list(batches_in_order(Shelf(records(6)), "old", Odd(), batch=10, folder=tmp_path, leave_out=nobody)) == [
        [2, 4, 0, 1, 3, 5]
    ]


def test_an_iterator_that_is_closed_early_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_ids, "RUN", 10)
    batches = batches_in_order(Shelf(records(50)), "old", Random(), batch=5, folder=tmp_path, leave_out=nobody)
    next(batches)
    assert len(list(tmp_path.iterdir())) == 1
    batches.close()
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_killed_process_are_removed_and_none_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_ids, "RUN", 5)
    left, fresh = tmp_path / "order-killed", tmp_path / "order-fresh"
    for place in (left, fresh):
        place.mkdir()
        (place / "0.jsonl").touch()
    in_use = batches_in_order(Shelf(records()), "c", Random(), batch=7, folder=tmp_path, leave_out=nobody)
    first = next(in_use)
    for place in set(tmp_path.iterdir()) - {fresh}:
        os.utime(place, (0, 0))
    again = list(batches_in_order(Shelf(records()), "c", Random(), batch=7, folder=tmp_path, leave_out=nobody))
    assert not left.exists()
    assert (fresh / "0.jsonl").exists()
    assert [first, *in_use] == again


@pytest.mark.parametrize("alter", [lambda text: text.replace("0.", "0.9", 1), lambda text: text[: text.index("\n") + 1]])
def test_a_sort_file_that_was_altered_is_not_used(tmp_path, monkeypatch, alter):
    monkeypatch.setattr(sorted_ids, "RUN", 10)
    rows = sorted_ids._rows

    def meanwhile(*args):
        for row in rows(*args):
            yield row
            for path in tmp_path.glob("*/0.jsonl"):
                path.write_text(alter(path.read_text()))

    monkeypatch.setattr(sorted_ids, "_rows", meanwhile)
    with pytest.raises(ArtifactError, match=r"0\.jsonl is not as it was written.*run the command again"):
        list(batches_in_order(Shelf(records(50)), "old", Random(), batch=5, folder=tmp_path, leave_out=nobody))
    assert list(tmp_path.iterdir()) == []


def test_it_reads_the_fields_that_the_order_needs_and_reports_how_far_it_is(tmp_path):
    shelf, seen = Shelf(records(20)), []
    order = Centroid.learned(shelf.records, label_field="kind")
    options = {"batch": 5, "folder": tmp_path, "leave_out": nobody, "fields": ["kind"]}
    list(batches_in_order(shelf, "old", order, progress=lambda done, total: seen.append((done, total)), **options))
    assert shelf.asked == [("kind",)]
    assert seen == [(7, 20), (14, 20), (20, 20)]


def test_a_gallery_with_nothing_left_has_no_batches(tmp_path):
    some = records(5)
    assert list(batches_in_order(Shelf([]), "old", Random(), batch=5, folder=tmp_path, leave_out=nobody)) == []
    assert list(batches_in_order(Shelf(some), "old", Random(), batch=5, folder=tmp_path, leave_out=set)) == []


def test_a_full_disk_is_said_in_a_sentence(tmp_path, monkeypatch):
    def full(rows, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sorted_ids, "RUN", 10)
    monkeypatch.setattr(sorted_ids, "_written", full)
    with pytest.raises(DiskFull, match="free some"):
        list(batches_in_order(Shelf(records(50)), "old", Random(), batch=5, folder=tmp_path, leave_out=nobody))
    assert list(tmp_path.iterdir()) == []
