"""Least sure first, every record once, in bounded memory."""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest

from rmvdb.errors import ArtifactError, ConfigError, DiskFull, PlanRefused, UnknownName
from rmvdb.planning import orders
from rmvdb.planning.orders import (
    ORDERS,
    Centroid,
    ClassificationScore,
    Cluster,
    Random,
    Uncertainty,
    make_order,
    ordered,
)
from rmvdb.types import Metric, Record


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


class Softmax:
    """A classifier whose classes are the axes."""

    def scores(self, vectors):
        e = np.exp(vectors)
        return (e / e.sum(1, keepdims=True)).astype(np.float32)


def records(n=50, dim=4, seed=0, *, words=False):
    rng = np.random.default_rng(seed)
    made = []
    for number in range(n):
        label = number % 3
        vector = (np.eye(dim)[label] * 3 + rng.normal(size=dim)).astype(np.float32)
        made.append(Record(id=f"r\n{number:04}" if words else number, vector=vector, fields={"kind": label}))
    return made


def nobody(ids):
    return set()


def test_the_classification_score_is_the_highest_class_probability():
    some = records(5)
    expected = Softmax().scores(np.stack([record.vector for record in some])).max(1)
    np.testing.assert_array_equal(ClassificationScore(classifier=Softmax()).confidence(some), expected)


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.L2])
def test_a_record_at_the_mean_of_its_class_is_sure_and_one_without_a_class_is_not(metric):
    order = Centroid.learned(iter(records(60)), label_field="kind", metric=metric)
    mean = order.means[1]
    probes = [
        Record(id=1, vector=mean, fields={"kind": 1}),
        Record(id=2, vector=mean, fields={"kind": 2}),
        Record(id=3, vector=mean, fields={"kind": "unheard of"}),
        Record(id=4, vector=mean, fields={}),
    ]
    own, other, unknown, none = order.confidence(probes)
    assert own > other > unknown == none == -np.inf
    assert own == pytest.approx(1 if metric is Metric.COSINE else 0, abs=1e-5)


def test_the_centroid_order_is_the_cosine_to_the_class_mean():
    some = records(30)
    order = Centroid.learned(some, label_field="kind")
    unit = {record.id: record.vector / np.linalg.norm(record.vector) for record in some}
    for record, actual in zip(some, order.confidence(some), strict=True):
        mean = np.mean([unit[other.id] for other in some if other.fields == record.fields], axis=0)
        assert actual == pytest.approx(unit[record.id] @ mean / np.linalg.norm(mean), abs=1e-5)


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.IP, Metric.L2])
def test_a_record_at_a_cluster_centre_is_surer_than_one_between_them(metric):
    order = Cluster.learned(iter(records(100)), metric=metric)
    assert order.centroids.shape == (10, 4)
    sure, unsure = order.confidence([Record(id=1, vector=order.centroids[0]), Record(id=2, vector=-order.centroids.mean(0))])
    assert sure > unsure
    assert Cluster.learned(records(100), metric=metric).centroids.tobytes() == order.centroids.tobytes()


def test_clusters_are_learned_from_a_bounded_even_sample(monkeypatch):
    monkeypatch.setattr(orders, "MOST_LEARNED", 100)
    order = Cluster.learned(iter(records(1000)))
    assert len(order.centroids) == 10
    kept = [record.id for record in orders._reservoir(iter(records(1000)), 0)]
    assert len(set(kept)) == 100
    assert 350 < np.mean(kept) < 650


def test_random_is_the_same_for_an_id_wherever_it_is_asked():
    some = records(200)
    order = Random(seed=3)
    there = order.confidence(some)
    np.testing.assert_array_equal(there[::-1], order.confidence(some[::-1]))
    assert len(set(there.tolist())) > 190
    assert (there != Random(seed=4).confidence(some)).any()
    assert (Random().confidence([Record(id=1)]) != Random().confidence([Record(id="1")])).all()


def test_every_name_makes_its_order_and_others_are_refused():
    kinds = [
        type(make_order(name, records(), classifier=Softmax(), label_field="kind", metric=Metric.COSINE, seed=1))
        for name in ORDERS
        if name != "uncertainty"
    ]
    assert kinds == [ClassificationScore, Centroid, Cluster, Random]
    assert isinstance(make_order("uncertainty", records(), metric=Metric.LORENTZ), Uncertainty)
    with pytest.raises(UnknownName, match="'cluster'"):
        make_order("clusters", records())


def test_an_order_that_lacks_what_it_needs_says_so():
    for name, message in (("classification-score", "classifier"), ("centroid", "field")):
        with pytest.raises(ConfigError, match=message):
            make_order(name, records())
    with pytest.raises(PlanRefused, match="'colour'"):
        make_order("centroid", records(), label_field="colour")
    with pytest.raises(PlanRefused, match="No record"):
        make_order("cluster", [])


@pytest.mark.parametrize("words", [False, True], ids=["int ids", "str ids"])
@pytest.mark.parametrize(("run", "most_open"), [(1000, 8), (9, 256), (3, 2)], ids=["in memory", "one merge", "several merges"])
def test_batches_hold_every_record_once_in_ascending_confidence(tmp_path, monkeypatch, words, run, most_open):
    monkeypatch.setattr(orders, "RUN", run)
    monkeypatch.setattr(orders, "MOST_OPEN", most_open)
    some, order = records(50, words=words), Random(seed=1)
    out = {some[3].id, some[40].id}
    batches = list(ordered(Shelf(some), "old", order, batch=8, folder=tmp_path, leave_out=lambda ids: out & set(ids)))
    confidence = dict(zip((record.id for record in some), order.confidence(some).tolist(), strict=True))
    assert [id for batch in batches for id in batch] == sorted(confidence.keys() - out, key=lambda id: (confidence[id], id))
    assert [len(batch) for batch in batches] == [8] * 6
    assert list(tmp_path.iterdir()) == []


def test_equal_confidences_go_by_id_and_unknown_ones_first(tmp_path):
    class Odd:
        def confidence(self, records):
            return np.array([np.nan if record.id == 4 else -np.inf if record.id == 2 else 0.5 for record in records], np.float32)

    assert list(ordered(Shelf(records(6)), "old", Odd(), batch=10, folder=tmp_path, leave_out=nobody)) == [[2, 4, 0, 1, 3, 5]]


def test_an_iterator_that_is_closed_early_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(orders, "RUN", 10)
    batches = ordered(Shelf(records(50)), "old", Random(), batch=5, folder=tmp_path, leave_out=nobody)
    next(batches)
    assert len(list(tmp_path.iterdir())) == 1
    batches.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_process_that_was_killed_left_is_removed_and_nothing_that_is_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(orders, "RUN", 5)
    left, fresh = tmp_path / "order-killed", tmp_path / "order-fresh"
    for place in (left, fresh):
        place.mkdir()
        (place / "0.jsonl").touch()
    in_use = ordered(Shelf(records()), "c", Random(), batch=7, folder=tmp_path, leave_out=nobody)
    first = next(in_use)
    for place in set(tmp_path.iterdir()) - {fresh}:
        os.utime(place, (0, 0))
    again = list(ordered(Shelf(records()), "c", Random(), batch=7, folder=tmp_path, leave_out=nobody))
    assert not left.exists()
    assert (fresh / "0.jsonl").exists()
    assert [first, *in_use] == again


@pytest.mark.parametrize("alter", [lambda text: text.replace("0.", "0.9", 1), lambda text: text[: text.index("\n") + 1]])
def test_a_sort_file_that_was_altered_is_not_used(tmp_path, monkeypatch, alter):
    monkeypatch.setattr(orders, "RUN", 10)
    confident = orders._confident

    def meanwhile(*args):
        for row in confident(*args):
            yield row
            for path in tmp_path.glob("*/0.jsonl"):
                path.write_text(alter(path.read_text()))

    monkeypatch.setattr(orders, "_confident", meanwhile)
    with pytest.raises(ArtifactError, match=r"0\.jsonl is not as it was written.*run the command again"):
        list(ordered(Shelf(records(50)), "old", Random(), batch=5, folder=tmp_path, leave_out=nobody))
    assert list(tmp_path.iterdir()) == []


def test_it_reads_the_fields_that_the_order_needs_and_reports_how_far_it_is(tmp_path):
    shelf, seen = Shelf(records(20)), []
    order = Centroid.learned(shelf.records, label_field="kind")
    options = {"batch": 5, "folder": tmp_path, "leave_out": nobody, "fields": ["kind"]}
    list(ordered(shelf, "old", order, progress=lambda done, total: seen.append((done, total)), **options))
    assert shelf.asked == [("kind",)]
    assert seen == [(7, 20), (14, 20), (20, 20)]


def test_a_gallery_with_nothing_left_has_no_batches(tmp_path):
    some = records(5)
    assert list(ordered(Shelf([]), "old", Random(), batch=5, folder=tmp_path, leave_out=nobody)) == []
    assert list(ordered(Shelf(some), "old", Random(), batch=5, folder=tmp_path, leave_out=set)) == []


def test_a_full_disk_is_said_in_a_sentence(tmp_path, monkeypatch):
    def full(rows, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(orders, "RUN", 10)
    monkeypatch.setattr(orders, "_written", full)
    with pytest.raises(DiskFull, match="free some"):
        list(ordered(Shelf(records(50)), "old", Random(), batch=5, folder=tmp_path, leave_out=nobody))
    assert list(tmp_path.iterdir()) == []
