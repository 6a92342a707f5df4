"""Each embedder runs once for a query, however many legs it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from rmvdb.errors import Mismatch, ModelError
from rmvdb.learning import references
from rmvdb.learning.network import Network
from rmvdb.learning.transforms import Config, Transform
from rmvdb.serving.blend import blended
from rmvdb.serving.loaded_models import Chain, LoadedModels
from rmvdb.types import Blend, Item, Leg, Metric, ServingPlan, Vectors
from rmvdb.upgrade.epoch_legs import with_new_queries

DIMS = {"v1": 4, "v2": 5, "v3": 6}
#: ρ of v2, ψ from v2 to v1, ρ of v3, ψ from v3 to v2.
SHAPES = {"rho2": (5, 5), "psi21": (5, 4), "rho3": (6, 6), "psi32": (6, 5)}

V2 = Leg(collection="c2", model="v2+rho2", metric=Metric.COSINE, embedder="v2", transforms=("rho2",))
V1 = Leg(collection="c1", model="v1", metric=Metric.COSINE, embedder="v2", transforms=("rho2", "psi21"))
V3 = Leg(collection="c3", model="v3+rho3", metric=Metric.COSINE, embedder="v3", transforms=("rho3",))


def transform(name: str) -> Transform:
    """Return a network of that name's shape; the same name gives the same weights."""
    d_in, d_out = SHAPES[name]
    torch.manual_seed(len(name) + d_in)
    return Transform(Network(Config(d_in=d_in, d_out=d_out, hidden=7)))


class Embedder:
    """Vectors that depend on the item; it counts its calls."""

    def __init__(self, version: str) -> None:
        self.version, self.calls = version, 0

    def embed(self, items: Sequence[Item]) -> Vectors:
        """(n, dim)"""
        self.calls += 1
        rows = [np.random.default_rng([*self.version.encode(), *str(item).encode()]) for item in items]
        return np.stack([row.normal(size=DIMS[self.version]) for row in rows]).astype(np.float32)


class Loaded(dict[str, Embedder]):
    """The embedders that were loaded, by version."""

    def __missing__(self, version: str) -> Embedder:
        return self.setdefault(version, Embedder(version))


@pytest.fixture
def embedders() -> Loaded:
    """None is loaded yet."""
    return Loaded()


@pytest.fixture
def loaded_models(embedders: Loaded) -> LoadedModels:
    """Loaded models of these shapes."""
    heads = {"v2+rho2": "rho2", "v3+rho3": "rho3"}
    return LoadedModels(
        load_embedder=embedders.__getitem__,
        load_chain=lambda version: Chain(embedder=version[:2], dim=DIMS[version[:2]], head=heads.get(version)),
        load_artifact=lambda sha256: transform(sha256).to_bytes(),
    )


def test_loaded_models_of_a_version_are_dropped_once_another_version_has_its_name() -> None:
    digests, loaded = {"v1": "a", "v2": "b"}, list[str]()

    def load(version: str) -> Embedder:
        loaded.append(version)
        return Embedder(version)

    loaded_models = LoadedModels(
        load_embedder=load,
        load_chain=lambda version: Chain(embedder=version, dim=DIMS[version], head=digests[version]),
        load_artifact=lambda sha256: b"",
        load_digests=lambda: dict(digests),
    )
    first = [(loaded_models.embedder(version), loaded_models.chain(version)) for version in ("v1", "v2")]
    digests["v3"] = "d"
    loaded_models.refresh()
    assert [(loaded_models.embedder(version), loaded_models.chain(version)) for version in ("v1", "v2")] == first
    digests["v2"] = "c"
    loaded_models.prepare(ServingPlan(gallery="g", epoch=1, legs=(), max_age=1, longest_search=1, staleness=0))
    assert loaded_models.embedder("v1") is first[0][0]
    assert loaded_models.embedder("v2") is not first[1][0]
    assert loaded_models.chain("v2").head == "c"
    assert loaded == ["v1", "v2", "v2"]


def test_a_search_brings_each_query_of_a_leg_to_the_newest_ones_scale() -> None:
    rng = np.random.default_rng(4)
    old_kept, new_kept = (rng.normal(size=(60, dim)).astype(np.float32) for dim in (4, 5))
    kept = references.kept(old_kept, new_kept, Metric.COSINE, Metric.COSINE)
    loaded_models = LoadedModels(
        load_embedder=Embedder,
        load_chain=lambda version: Chain(embedder=version, dim=DIMS[version]),
        load_artifact=lambda sha256: kept.to_bytes(),
    )
    new = Leg(collection="c2", model="v2", metric=Metric.COSINE, embedder="v2")
    old = Leg(collection="c1", model="v1", metric=Metric.COSINE, embedder="v1", calibration="kept")
    asked = {"c2": rng.normal(size=(3, 5)).astype(np.float32), "c1": rng.normal(size=(3, 4)).astype(np.float32)}
    expected = kept.calibrations(asked["c1"], asked["c2"])
    distances = np.linspace(0.1, 1.5, 6)
    for legs in ((new, old), (old, new)):  # a roll back has them in the other order
        none, scale = (loaded_models.scales(legs, asked)[legs.index(each)] for each in (new, old))
        assert none is None
        assert scale is not None
        found = scale(distances, [1, 3, 2])
        parts = zip(expected, np.split(distances, [1, 4]), strict=True)
        np.testing.assert_array_equal(found, np.concatenate([one.apply(part) for one, part in parts]))


def served(*old: Leg) -> ServingPlan:
    """v3 over these legs."""
    legs = (V3, *(with_new_queries(leg, old[0], V3, "psi32") for leg in old))
    return ServingPlan(gallery="g", epoch=1, legs=legs, max_age=1, longest_search=1, staleness=0)


def test_composed_transforms_are_both_upgrades_one_after_the_other(loaded_models: LoadedModels, embedders: Loaded) -> None:
    plan = served(V2, V1)
    queries = loaded_models.queries(plan, ["a", "b"], {})
    expected = embedders["v3"].embed(["a", "b"])
    for collection, name in (("c3", "rho3"), ("c2", "psi32"), ("c1", "psi21")):
        expected = transform(name).apply(expected)
        np.testing.assert_array_equal(queries[collection], expected)
    assert plan.embedders == ("v3",)
    assert {version: each.calls for version, each in embedders.items()} == {"v3": 2}  # one of them is this test's


def test_vectors_that_clients_write_into_a_leg_behind_are_composed_too(loaded_models: LoadedModels) -> None:
    plan = served(V2, V1)
    queries = loaded_models.queries(plan, ["a"], {})
    for leg in plan.legs:
        np.testing.assert_array_equal(loaded_models.stored(leg, ["a"], {}), queries[leg.collection])


def test_a_leg_that_nothing_leads_to_keeps_its_embedder(loaded_models: LoadedModels, embedders: Loaded) -> None:
    own = Leg(collection="c1", model="v1", metric=Metric.COSINE, embedder="v1")
    plan = served(V2, own)
    assert plan.legs[2] == own
    assert plan.embedders == ("v3", "v1")
    np.testing.assert_array_equal(loaded_models.queries(plan, ["a"], {})["c1"], embedders["v1"].embed(["a"]))


def test_a_ready_vector_goes_on_from_where_its_model_is(loaded_models: LoadedModels) -> None:
    two = served(V2, V1)
    behind = ServingPlan(gallery="g", epoch=1, legs=two.legs[1:], max_age=1, longest_search=1, staleness=0)
    vectors = np.ones((1, 5), np.float32)
    found = loaded_models.vectors(behind, vectors, "v2+rho2")
    np.testing.assert_array_equal(found["c2"], vectors)
    np.testing.assert_array_equal(found["c1"], transform("psi21").apply(vectors))
    with pytest.raises(Mismatch, match=r"No transform leads from vectors of model 'v2\+rho2' to collection 'c3'"):
        loaded_models.vectors(two, vectors, "v2+rho2")


def test_a_refused_vector_names_only_models_that_lead_to_every_collection(loaded_models: LoadedModels) -> None:
    with pytest.raises(Mismatch, match=r"; search with vectors of v3 or v3\+rho3$"):
        loaded_models.vectors(served(V2, V1), np.ones((1, 4), np.float32), "v1")
    apart = served(V2, Leg(collection="c1", model="v1", metric=Metric.COSINE, embedder="v1"))  # as by method naive
    for model, dim in (("v3", 6), ("v1", 4)):
        with pytest.raises(Mismatch, match=r"; search by an item until one collection is left$"):
            loaded_models.vectors(apart, np.ones((1, dim), np.float32), model)


def blending(*old: Leg) -> ServingPlan:
    """v3 over these legs, each blended with what it was searched with before."""
    legs = [replace(with_new_queries(leg, old[0], V3, "psi32"), blend=part(leg)) for leg in old]
    return ServingPlan(gallery="g", epoch=1, legs=(V3, *legs), max_age=1, longest_search=1, staleness=0)


def part(leg: Leg) -> Blend:
    return Blend(embedder=leg.embedder, transforms=leg.transforms, weight=0.3)


def test_a_blend_has_both_models_queries_and_each_model_embeds_them_once(loaded_models: LoadedModels, embedders: Loaded) -> None:
    plan = blending(V2, V1)
    loaded_models.prepare(plan)
    assert set(embedders) == {"v2", "v3"} == set(plan.embedders)
    embedded: dict[str, Vectors] = {}
    queries = loaded_models.queries(plan, ["a", "b"], embedded)
    loaded_models.queries(plan, ["a", "b"], embedded)
    assert {version: each.calls for version, each in embedders.items()} == {"v2": 1, "v3": 1}
    for leg in plan.legs:
        own = loaded_models.apply(leg.transforms, embedded["v3"])
        if leg.blend is None:
            np.testing.assert_array_equal(queries[leg.collection], own)
            continue
        other = loaded_models.apply(leg.blend.transforms, embedded["v2"])
        np.testing.assert_array_equal(queries[leg.collection], blended(own, other, 0.3, leg.metric))


def test_a_plan_with_a_blend_is_not_ready_without_the_old_model(loaded_models: LoadedModels, embedders: Loaded) -> None:
    def load(version: str) -> Embedder:
        if version == "v2":
            raise ModelError("no v2 here")
        return embedders[version]

    loaded_models._load_embedder = load
    loaded_models.prepare(served(V2, V1))
    with pytest.raises(ModelError, match="no v2 here"):
        loaded_models.prepare(blending(V2, V1))


def test_clients_write_the_same_vectors_into_a_blended_leg_as_before(loaded_models: LoadedModels) -> None:
    for before, leg in zip((V2, V1), blending(V2, V1).legs[1:], strict=True):
        np.testing.assert_array_equal(loaded_models.stored(leg, ["a"], {}), loaded_models.stored(before, ["a"], {}))


def test_of_a_blend_a_ready_vector_serves_the_part_of_its_model(loaded_models: LoadedModels) -> None:
    plan = blending(V2, V1)
    newest = np.ones((1, 6), np.float32)
    found = loaded_models.vectors(plan, newest, "v3")
    for leg in plan.legs:
        np.testing.assert_array_equal(found[leg.collection], loaded_models.apply(leg.transforms, newest))
    behind = replace(plan, legs=plan.legs[1:])
    older = np.ones((1, 5), np.float32)
    found = loaded_models.vectors(behind, older, "v2")
    np.testing.assert_array_equal(found["c2"], loaded_models.apply(["rho2"], older))
    np.testing.assert_array_equal(found["c1"], loaded_models.apply(["rho2", "psi21"], older))
