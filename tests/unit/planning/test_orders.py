"""Each order gives a confidence by which the least sure records go first."""

from dataclasses import replace

import numpy as np
import pytest

from rmvdb.errors import ConfigError, PlanRefused, UnknownName
from rmvdb.planning.orders import cluster
from rmvdb.planning.orders.centroid import Centroid
from rmvdb.planning.orders.classification_score import ClassificationScore
from rmvdb.planning.orders.cluster import Cluster
from rmvdb.planning.orders.random import Random
from rmvdb.planning.orders.table import ORDERS, Known, make_order
from rmvdb.planning.orders.uncertainty import Uncertainty
from rmvdb.types import Metric, Record

#: Of a collection without classifier and labels.
NOTHING = Known(metric=Metric.COSINE)


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


def test_a_label_that_is_a_list_or_an_object_is_a_class_like_another():
    some = records(30)
    expected = Centroid.learned(some, label_field="kind").confidence(some)
    for odd in (lambda kind: [kind, "x"], lambda kind: {"kind": kind}):
        changed = [replace(record, fields={"kind": odd(record.fields["kind"])}) for record in some]
        np.testing.assert_array_equal(Centroid.learned(changed, label_field="kind").confidence(changed), expected)


@pytest.mark.parametrize("metric", [Metric.COSINE, Metric.IP, Metric.L2])
def test_a_record_at_a_cluster_centre_is_surer_than_one_between_them(metric):
    order = Cluster.learned(iter(records(100)), metric=metric)
    assert order.centroids.shape == (10, 4)
    sure, unsure = order.confidence([Record(id=1, vector=order.centroids[0]), Record(id=2, vector=-order.centroids.mean(0))])
    assert sure > unsure
    assert Cluster.learned(records(100), metric=metric).centroids.tobytes() == order.centroids.tobytes()


def test_clusters_are_learned_from_a_bounded_even_sample(monkeypatch):
    monkeypatch.setattr(cluster, "MOST_LEARNED", 100)
    order = Cluster.learned(iter(records(1000)))
    assert len(order.centroids) == 10
    kept = [record.id for record in cluster._reservoir(iter(records(1000)), 0)]
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
        type(make_order(name, records(), Known(metric=Metric.COSINE, classifier=Softmax(), label_field="kind", seed=1)))
        for name in ORDERS
        if name != "uncertainty"
    ]
    assert kinds == [ClassificationScore, Centroid, Cluster, Random]
    assert isinstance(make_order("uncertainty", records(), Known(metric=Metric.LORENTZ)), Uncertainty)
    with pytest.raises(UnknownName, match="'cluster'"):
        make_order("clusters", records(), NOTHING)


def test_an_order_that_lacks_what_it_needs_says_so():
    for name, message in (("classification-score", "classifier"), ("centroid", "field")):
        with pytest.raises(ConfigError, match=message):
            make_order(name, records(), NOTHING)
    with pytest.raises(PlanRefused, match="'colour'"):
        make_order("centroid", records(), Known(metric=Metric.COSINE, label_field="colour"))
    with pytest.raises(PlanRefused, match="No record"):
        make_order("cluster", [], NOTHING)
