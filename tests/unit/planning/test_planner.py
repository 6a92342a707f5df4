"""What a planner draws, and what it recommends where nobody knows the queries. All in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rmvdb.learning.method import Method
from rmvdb.planning import planner as planners
from rmvdb.planning import sample as samples
from rmvdb.planning.planner import Planner
from rmvdb.planning.question import Question
from rmvdb.planning.sample import Sample
from rmvdb.serving.loaded_models import Chain
from rmvdb.storage.artifacts import Artifacts
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import Item, Leg, Metric, Query, Record, Vectors
from tests.support.inprocess import DIMS, Gallery, TextEmbedder, make, vector

LEG = Leg(collection="texts_v1", model="v1", metric=Metric.COSINE, embedder="v1")
#: v2 sees what v1 sees, from elsewhere: any map is right.
TURN = np.linalg.qr(np.random.default_rng(0).normal(size=(DIMS["v2"], DIMS["v2"])))[0][: DIMS["v1"]].astype(np.float32)


class Turned(TextEmbedder):
    """Its queries are embedded their own way."""

    def embed(self, items: Sequence[Item]) -> Vectors:
        """(n, dim)"""
        seen = np.stack([vector("v1", item) for item in items])
        return seen if self.version == "v1" else seen @ TURN

    embed_queries = embed


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """Eighty texts."""
    made = make(tmp_path, records=80, deployed=False)
    made.loaded_models._load_embedder = Turned
    made.loaded_models._load_chain = lambda version: Chain(embedder=version, dim=DIMS[version], has_own_queries=True)
    yield made
    made.registry.close()


def planner(gallery: Gallery) -> Planner:
    return Planner(
        store=gallery.store,
        loaded_models=gallery.loaded_models,
        artifacts=Artifacts(gallery.folder / "artifacts"),
        source=gallery.source,
        cache=lambda version: EmbeddingCache(LocalFolder(gallery.folder / "embeddings"), model=version),
        folder=gallery.folder / "plans",
    )


def question(**options: object) -> Question:
    return Question(gallery="texts", from_version="v1", to_version="v2", rescore=0, **options)  # type: ignore[arg-type]


def judged(gallery: Gallery, *ids: int) -> str:
    """Write a file of queries, each of which one record answers."""
    file = gallery.folder / "judged.jsonl"
    file.write_text("\n".join(json.dumps({"item": f"t{id}", "answers": [id]}) for id in ids))
    return str(file)


METHODS = (Method.NAIVE, Method.PROCRUSTES)


def test_a_comparison_recommends_what_a_plan_would_choose(gallery: Gallery) -> None:
    to = gallery.registry.version("v2")
    found = planner(gallery).compare(question(), [LEG], to, classifiers=[None], methods=METHODS, orders=["random"])
    plan = planner(gallery).plan(question(order="random"), [LEG], to, classifiers=[None])
    assert plan.method in (Method.NAIVE, Method.BLEND)
    assert found.recommended.method is Method.NAIVE
    assert found.recommended.choice.endswith(planners.UNKNOWN_QUERIES)
    assert {row.name for row in found.rows} >= set(METHODS)  # all are shown
    asked = question(queries=judged(gallery, *range(1, 21)))
    known = planner(gallery).compare(asked, [LEG], to, classifiers=[None], methods=METHODS, orders=["random"])
    assert known.recommended.method is Method.PROCRUSTES


def test_so_many_queries_measure_at_most(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planners, "MOST_JUDGED", 12)
    asked, to = question(queries=judged(gallery, *range(1, 31))), gallery.registry.version("v2")
    found = planner(gallery).compare(asked, [LEG], to, classifiers=[None], methods=METHODS, orders=["random"])
    assert found.recommended.evaluated == 12


def drawn(gallery: Gallery, **options: object) -> Sample:
    report = lambda *_: None  # noqa: E731
    return planner(gallery)._sampler.sample("v2", [LEG], [80], frozenset(), report, seed=0, **options)  # type: ignore[arg-type]


def test_a_slow_embedder_leaves_answers_and_others(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "CHUNK", 10)
    monkeypatch.setattr(samples, "ENOUGH", 20)
    queries = [Query(item=f"t{id}", answers=(id,)) for id in range(1, 41)]
    found = drawn(gallery, queries=queries, seconds=0.0)
    assert found.queries is not None
    assert (len(found.records), found.queries.relevance.any(axis=0).sum()) == (20, 10)
    few = drawn(gallery, queries=queries[:6], seconds=0.0)
    assert few.queries is not None
    assert (len(few.records), few.queries.relevance.any(axis=0).sum()) == (20, 6)


def test_it_is_known_of_each_query_whether_it_is_an_excerpt(gallery: Gallery) -> None:
    long = {id for id in gallery.source.of if id % 3 == 0}  # type: ignore[operator]
    for id in long:
        gallery.source.of[id] = " ".join(f"t{id}w{number}" for number in range(40))
    found = drawn(gallery, texts=True)
    assert found.as_queries is not None
    assert found.as_queries.excerpts
    assert found.as_queries.whole is not None
    assert {record.id for record, whole in zip(found.records, found.as_queries.whole, strict=True) if not whole} == long


def test_a_declared_model_of_texts_is_tried_though_nobody_knows_the_queries(gallery: Gallery) -> None:
    class Same(TextEmbedder):
        def embed(self, items: Sequence[Item]) -> Vectors:
            return np.stack([vector("v1", item) for item in items])

        embed_queries = embed

    gallery.loaded_models._load_embedder = Same
    gallery.loaded_models._load_chain = lambda version: Chain(embedder=version, dim=DIMS["v1"], has_own_queries=True)
    found = {}
    for name, declared in (("v1b", "v1"), ("v1c", None)):
        to = gallery.registry.add_version(
            name=name, embedder=f"tests:{name}", options={}, classifier=None, dim=DIMS["v1"], metric="COSINE", fingerprint=None,
            probes=None, probe_kind="text", base=None, head=None, compatible_with=declared,
        )  # fmt: skip
        asked = replace(question(order="random"), to_version=name)
        found[name] = planner(gallery).plan(asked, [LEG], to, classifiers=[None]).method
    assert found == {"v1b": Method.IDENTITY, "v1c": Method.NAIVE}


def test_a_gallery_that_is_too_small_to_measure_is_rescored_as_it_was_asked_for(tmp_path: Path) -> None:
    small = make(tmp_path, records=20, deployed=False)
    to = small.registry.version("v2")
    asked = replace(question(order="random", method=Method.NAIVE), rescore=5)
    assert planner(small).plan(asked, [LEG], to, classifiers=[None]).rescore == 5
    small.registry.close()


def test_kept_queries_whose_files_are_gone_are_left_out(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may run on another machine than the searches that were kept."""
    monkeypatch.setattr(samples, "CHUNK", 10)
    drawn: list[Sample] = []
    real = planners.Sampler.sample
    monkeypatch.setattr(planners.Sampler, "sample", lambda *args, **options: drawn.append(real(*args, **options)) or drawn[-1])
    log = [Query(item="broken") for _ in range(25)] + [Query(item=f"asked {number}") for number in range(5)]

    def plan(asked: list[Query]) -> None:
        to = gallery.registry.version("v2")
        planner(gallery).plan(question(order="random", method=Method.PROCRUSTES), [LEG], to, classifiers=[None], log=asked)

    monkeypatch.setattr(Turned, "embed", lambda self, items: _broken(items) or TextEmbedder.embed(self, items))
    monkeypatch.setattr(Turned, "embed_queries", lambda self, items: _broken(items) or TextEmbedder.embed(self, items))
    plan(log)
    assert drawn[-1].logged is not None
    assert len(drawn[-1].logged) == 5
    plan(log[:10])
    assert drawn[-1].logged is None


def _broken(items: Sequence[Item]) -> None:
    if "broken" in items:
        raise FileNotFoundError("broken")


def test_a_plan_is_taken_again_for_a_day_while_the_gallery_stays_as_large(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = gallery.registry.version("v2")
    asked = question(order="random", method=Method.NAIVE)

    def plan(log: int = 0) -> float:
        kept = [Query(item=f"asked {number}") for number in range(log)]
        return planner(gallery).plan(asked, [LEG], to, classifiers=[None], log=kept).made_at

    first, with_log = plan(), plan(log=40)
    assert plan() == first
    assert plan(log=50) == with_log != first
    assert plan(log=90) != with_log
    more = {id: f"t{id}" for id in range(81, 101)}
    gallery.store.upsert("texts_v1", [Record(id=id, vector=vector("v1", text), fields={}) for id, text in more.items()])
    gallery.source.of |= more
    second = plan()
    assert second > first
    monkeypatch.setattr("rmvdb.planning.plan.LASTS", 0.0)
    assert plan() > second


def test_an_empty_label_is_no_label(gallery: Gallery) -> None:
    old = gallery.held()["old"].values()
    labelled = [replace(each, fields={"kind": ["", "a", "b"][each.id % 3]}) for each in old]
    gallery.store.upsert("texts_v1", labelled)
    plan = planner(gallery).plan(
        question(order="random", method=Method.NAIVE, labels="kind"), [LEG], gallery.registry.version("v2"), classifiers=[None]
    )
    assert plan.unlabelled == 26
