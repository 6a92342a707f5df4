"""Index parameters: refused before anything is made, and sent to Milvus exactly as they were given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
from pymilvus.grpc_gen import common_pb2, milvus_pb2, milvus_pb2_grpc, schema_pb2

from rmvdb.engines.index_rules import Reach, check, reach, search_for
from rmvdb.engines.milvus import MilvusStore
from rmvdb.errors import ConfigError, EngineError
from rmvdb.types import IdType, Index, Metric, Schema

GOOD = [
    Index(),
    Index(search={"level": 3}),
    Index(type="FLAT"),
    Index(type="IVF_FLAT", params={"nlist": 1024}, search={"nprobe": 1024}),
    Index(type="IVF_FLAT", params={"nlist": "1024"}, search={"nprobe": "16"}),
    Index(type="IVF_SQ8", params={"nlist": 65_536}),
    Index(type="IVF_PQ", params={"nlist": 128, "m": 16, "nbits": 8}, search={"nprobe": 8}),
    Index(type="HNSW", params={"M": 2, "efConstruction": 1}, search={"ef": 10_000}),
    Index(type="SCANN", params={"nlist": 128, "with_raw_data": True}, search={"nprobe": 8, "reorder_k": 100}),
    Index(type="DISKANN", search={"search_list": 100}),
    Index(type="DISKANN", params={"MaxDegree": 56, "PQCodeBudgetGBRatio": 0.125}, search={"BeamWidthRatio": 4.0}),
]
GPU = [
    Index(
        type="GPU_CAGRA",
        params={
            "intermediate_graph_degree": 128,
            "graph_degree": 64,
            "build_algo": "NN_DESCENT",
            "cache_dataset_on_device": "true",
        },
        search={"itopk_size": 128, "search_width": 4, "min_iterations": 0, "max_iterations": 0, "team_size": 0},
    ),
    Index(type="GPU_CAGRA", params={"adapt_for_cpu": True}, search={"ef": 64}),
    Index(type="GPU_IVF_FLAT", params={"nlist": 1024}, search={"nprobe": 16}),
    Index(
        type="GPU_IVF_PQ", params={"nlist": 1024, "m": 32, "nbits": 8, "cache_dataset_on_device": "false"}, search={"nprobe": 16}
    ),
    Index(type="GPU_BRUTE_FORCE"),
]
BAD = [
    (Index(type="HNWS"), "index type 'HNWS' is not known; did you mean 'HNSW'?"),
    (Index(type="hnsw"), "index type 'hnsw' is not known; did you mean 'HNSW'?"),
    (Index(type="GPU_CAGRAH"), "did you mean 'GPU_CAGRA'?"),
    (Index(type="LSH"), "there are: AUTOINDEX, FLAT, IVF_FLAT"),
    (Index(type="FLAT", params={"nlist": 4}), "FLAT index: params.nlist is not known; there is nothing to set"),
    (Index(type="IVF_FLAT", params={"nlists": 4}), "IVF_FLAT index: params.nlists is not known; did you mean 'nlist'?"),
    (Index(type="HNSW", params={"m": 16}), "HNSW index: params.m is not known; did you mean 'M'?"),
    (Index(type="HNSW", params={"ef_construction": 16}), "did you mean 'efConstruction'?"),
    (Index(type="HNSW", search={"nprobe": 16}), "HNSW index: search.nprobe is not known; there are: ef"),
    (Index(type="IVF_FLAT", params={"nlist": 0}), "params.nlist = 0 must be a whole number from 1 to 65536"),
    (Index(type="IVF_FLAT", params={"nlist": 65_537}), "params.nlist = 65537 must be a whole number from 1 to 65536"),
    (Index(type="IVF_FLAT", params={"nlist": 1.5}), "params.nlist = 1.5 must be a whole number"),
    (Index(type="IVF_FLAT", params={"nlist": True}), "params.nlist = True must be a whole number"),
    (Index(type="IVF_FLAT", params={"nlist": "many"}), "params.nlist = 'many' must be a whole number"),
    (Index(type="IVF_FLAT", params={"nlist": None}), "params.nlist = None must be a whole number"),
    (Index(type="IVF_FLAT", params={"nlist": float("nan")}), "params.nlist = nan must be a whole number"),
    (Index(type="IVF_FLAT", params={"nlist": 8}, search={"nprobe": 9}), "search.nprobe = 9 must not exceed params.nlist = 8"),
    (Index(type="IVF_FLAT", search={"nprobe": 129}), "search.nprobe = 129 must not exceed params.nlist = 128"),
    (Index(type="IVF_PQ"), "IVF_PQ index: params.m must be given; it is a whole number from 1 to 65536"),
    (Index(type="IVF_PQ", params={"m": 48}), "params.m = 48 must divide the dimension, which is 128; 32 does"),
    (Index(type="IVF_PQ", params={"m": 8, "nbits": 65}), "params.nbits = 65 must be a whole number from 1 to 64"),
    (Index(type="HNSW", params={"M": 1}), "params.M = 1 must be a whole number from 2 to 2048"),
    (Index(type="HNSW", params={"M": 2049}), "params.M = 2049 must be a whole number from 2 to 2048"),
    (Index(type="HNSW", search={"ef": 0}), "search.ef = 0 must be a whole number of at least 1"),
    (Index(type="SCANN", params={"with_raw_data": "yes"}), "params.with_raw_data = 'yes' must be true or false"),
    (
        Index(type="DISKANN", params={"PQCodeBudgetGBRatio": 0.3}),
        "params.PQCodeBudgetGBRatio = 0.3 must be a number from 0 to 0.25",
    ),
    (Index(type="DISKANN", params={"MaxDegrees": 3}), "did you mean 'MaxDegree'?"),
    (Index(type="GPU_CAGRA", params={"build_algo": "ivf"}), "params.build_algo = 'ivf' must be IVF_PQ or NN_DESCENT"),
    (Index(type="GPU_CAGRA", params={"graph_degree": 129}), "graph_degree = 129 must not exceed intermediate_graph_degree = 128"),
    (Index(type="GPU_CAGRA", params={"adapt_for_cpu": "true"}), "search.ef must be given where params.adapt_for_cpu is true"),
    (Index(type="GPU_CAGRA", search={"team_size": 64}), "search.team_size = 64 must be a whole number from 0 to 32"),
    (Index(type="GPU_IVF_PQ", params={"nlist": 8}), "GPU_IVF_PQ index: params.m must be given"),
    (Index(type="GPU_BRUTE_FORCE", search={"nprobe": 1}), "search.nprobe is not known; there is nothing to set"),
]


@pytest.mark.parametrize("index", [*GOOD, *GPU], ids=lambda index: index.type)
def test_parameters_within_their_ranges_pass(index: Index) -> None:
    check(index, dim=128, metric=Metric.IP, engine="milvus 2.6.0")
    check(index, dim=128, metric=Metric.L2, engine="milvus 2.6.0")


@pytest.mark.parametrize("index", GOOD, ids=lambda index: index.type)
def test_the_indexes_of_the_cpu_compare_by_the_cosine_too(index: Index) -> None:
    check(index, dim=128, metric=Metric.COSINE, engine="milvus 2.6.0")


@pytest.mark.parametrize("index", GPU, ids=lambda index: index.type)
def test_the_indexes_of_the_gpu_do_not_compare_by_the_cosine(index: Index) -> None:
    with pytest.raises(ConfigError, match=f"{index.type} index: Milvus' GPU indexes do not support COSINE; normalise"):
        check(index, dim=128, metric=Metric.COSINE, engine="milvus 2.6.0")


@pytest.mark.parametrize(("index", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_a_bad_parameter_is_named_with_what_it_may_be(index: Index, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(index, dim=128, metric=Metric.IP, engine="milvus 2.6.0")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "kind", "way_out"),
    [
        ("milvus-lite 2.5.1", "HNSW", "AUTOINDEX, FLAT, IVF_FLAT, or use a Milvus server"),
        ("milvus 2.3.5", "GPU_CAGRA", "SCANN, DISKANN, GPU_IVF_FLAT, GPU_IVF_PQ"),
    ],
)
def test_an_index_that_the_engine_lacks_is_named_with_those_it_has(engine: str, kind: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(Index(type=kind), dim=128, metric=Metric.IP, engine=engine)
    assert str(caught.value).startswith(f"{engine} has no index of type {kind}; set index.type to one that it has: AUTOINDEX")
    assert str(caught.value).endswith(way_out)


def test_an_index_of_lite_3_that_misses_what_matches_a_filter_is_refused() -> None:
    said = (
        r"milvus-lite 3\.2\.2 misses matches of a filter with an index of type HNSW; set index\.type to one that it "
        r"has: AUTOINDEX, FLAT, or use a Milvus server"
    )
    with pytest.raises(ConfigError, match=said):
        check(Index(type="HNSW"), dim=128, metric=Metric.IP, engine="milvus-lite 3.2.2")


@pytest.mark.parametrize(("kind", "name"), [("HNSW", "M"), ("IVF_FLAT", "nlist"), ("SCANN", "nlist")])
def test_milvus_2_3_needs_the_parameters_that_later_versions_have_a_default_for(kind: str, name: str) -> None:
    check(Index(type=kind), dim=128, metric=Metric.IP, engine="milvus 2.6.0")
    with pytest.raises(ConfigError, match=rf"{kind} index: params\.{name} must be given; it is a whole number from"):
        check(Index(type=kind), dim=128, metric=Metric.IP, engine="milvus 2.3.5")


@pytest.mark.parametrize("engine", ["", "faiss 1.15.1", "milvus 2.4.0", "milvus 2.30.1", "milvus-lite 4.0"])
def test_an_unknown_engine_is_believed_to_have_every_index(engine: str) -> None:
    check(Index(type="GPU_CAGRA"), dim=128, metric=Metric.IP, engine=engine)


# Existing indexes


def test_search_parameters_hold_for_an_index_of_their_type_and_must_fit_it() -> None:
    there = Index(type="IVF_FLAT", params={"nlist": "16"})
    assert search_for(there, Index(type="IVF_FLAT", search={"nprobe": 16}), dim=8) == {"nprobe": 16}
    assert search_for(there, Index(type="HNSW", search={"ef": 16}), dim=8) == {}
    assert search_for(Index(type="HNSW_SQ"), Index(), dim=8) == {}
    for search, sentence in (
        ({"nprobe": 17}, "IVF_FLAT index: search.nprobe = 17 must not exceed params.nlist = 16"),
        ({"ef": 17}, "IVF_FLAT index: search.ef is not known; there are: nprobe"),
        ({"nprobe": 0}, "IVF_FLAT index: search.nprobe = 0 must be a whole number from 1 to 65536"),
    ):
        with pytest.raises(ConfigError) as caught:
            search_for(there, Index(type="IVF_FLAT", search=search), dim=8)
        assert str(caught.value) == sentence


def test_an_engine_that_does_not_tell_how_an_index_was_built_has_the_last_word() -> None:
    chosen = Index(type="IVF_FLAT", search={"nprobe": 500})
    assert search_for(Index(type="IVF_FLAT"), chosen, dim=8) == {"nprobe": 500}


# What a search can be sure to find


def test_each_type_of_index_is_asked_for_as_much_as_it_can_read() -> None:
    lists = {"nlist": "64"}
    assert reach(Index(type="FLAT")) == Reach(exact=True)
    assert reach(Index()) == reach(Index(type="HNSW")) == Reach(search={"ef": 512})
    assert reach(Index(type="IVF_FLAT", params=lists)) == Reach(search={"nprobe": 64}, exact=True)
    assert reach(Index(type="IVF_SQ8", params=lists)) == Reach(search={"nprobe": 64})
    assert reach(Index(type="IVF_FLAT")).search == {"nprobe": 128}  # Milvus' own number of lists
    assert reach(Index(type="IVF_PQ", params=lists)) == Reach(search={"nprobe": 64}, nearest=False)
    assert reach(Index(type="SCANN", params=lists)) == Reach(search={"nprobe": 64, "reorder_k": 1_024})
    assert not reach(Index(type="SCANN", params={"with_raw_data": "false"})).nearest
    assert reach(Index(type="GPU_IVF_FLAT", params=lists)) == Reach(search={"nprobe": 64}, exact=True, most=256)
    cagra = reach(Index(type="GPU_CAGRA"))
    assert cagra == Reach(search={"itopk_size": 512, "ef": 512}, filters=False, most=1_024)  # ef: with adapt_for_cpu
    assert reach(Index(type="HNSW_SQ")) == Reach(filters=False, nearest=False)


@pytest.mark.parametrize("index", [*GOOD, *GPU], ids=lambda index: index.type)
def test_the_widest_search_of_an_index_is_within_its_own_rules(index: Index) -> None:
    widest = {name: value for name, value in reach(index).search.items() if (index.type, name) != ("AUTOINDEX", "ef")}
    check(Index(type=index.type, params=index.params, search={**index.search, **widest}), dim=128, metric=Metric.IP, engine="")


# The parameters on the wire


class Recorder(milvus_pb2_grpc.MilvusServiceServicer):  # type: ignore[misc]
    """A server that says yes to everything and remembers what it was asked; it has no GPU either."""

    def __init__(self) -> None:
        self.collection: milvus_pb2.CreateCollectionRequest | None = None
        self.index: milvus_pb2.CreateIndexRequest | None = None
        self.search: milvus_pb2.SearchRequest | None = None
        #: The number of hits of each search.
        self.wanted: list[int] = []
        self.load_state = common_pb2.LoadState.LoadStateNotLoad

    def Connect(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's names
        return milvus_pb2.ConnectResponse(server_info=common_pb2.ServerInfo(build_tags="2.6.0"))

    def GetVersion(self, request: Any, context: Any) -> Any:  # noqa: N802
        return milvus_pb2.GetVersionResponse(version="2.6.0")

    def AllocTimestamp(self, request: Any, context: Any) -> Any:  # noqa: N802
        return milvus_pb2.AllocTimestampResponse(timestamp=1)

    def CreateCollection(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.collection = request
        return common_pb2.Status()

    def DescribeCollection(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.collection is None:
            return milvus_pb2.DescribeCollectionResponse(status=common_pb2.Status(code=100, reason="collection not found"))
        schema = schema_pb2.CollectionSchema.FromString(self.collection.schema)
        return milvus_pb2.DescribeCollectionResponse(schema=schema, collection_name=schema.name)

    def CreateIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.index = request
        return common_pb2.Status()

    def DescribeIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.index is None:
            return milvus_pb2.DescribeIndexResponse(status=common_pb2.Status(code=700, reason="index not found"))
        found = milvus_pb2.IndexDescription(
            index_name=self.index.index_name, field_name=self.index.field_name, params=self.index.extra_params, state=3
        )
        return milvus_pb2.DescribeIndexResponse(index_descriptions=[found])

    def LoadCollection(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.load_state = common_pb2.LoadState.LoadStateLoaded
        return common_pb2.Status()

    def GetLoadState(self, request: Any, context: Any) -> Any:  # noqa: N802
        return milvus_pb2.GetLoadStateResponse(state=self.load_state)

    def ShowPartitions(self, request: Any, context: Any) -> Any:  # noqa: N802
        return milvus_pb2.ShowPartitionsResponse(partition_names=["_default"])

    def Search(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.search = request
        self.wanted.append(next(int(pair.value) for pair in request.search_params if pair.key == "topk"))
        ids = schema_pb2.IDs(int_id=schema_pb2.LongArray(data=[1]))
        data = schema_pb2.SearchResultData(num_queries=1, top_k=1, ids=ids, scores=[0.5], topks=[1], primary_field_name="id")
        return milvus_pb2.SearchResults(results=data)


@pytest.fixture
def recorder() -> Iterator[tuple[Recorder, MilvusStore]]:
    servicer, server = Recorder(), grpc.server(futures.ThreadPoolExecutor(2))
    milvus_pb2_grpc.add_MilvusServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    store = MilvusStore(lambda: f"http://127.0.0.1:{port}")
    yield servicer, store
    store.close()
    server.stop(None).wait()


def as_text(values: dict[str, Any]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def searched(servicer: Recorder) -> dict[str, Any]:
    """Return the parameters of the last search; pymilvus puts the metric among them."""
    assert servicer.search is not None
    asked = {pair.key: pair.value for pair in servicer.search.search_params}
    params: dict[str, Any] = json.loads(asked["params"])
    assert asked["metric_type"] == params.pop("metric_type", "IP") == "IP"
    return params


@pytest.mark.parametrize("index", [*GOOD, *GPU], ids=lambda index: index.type)
def test_exactly_the_parameters_given_reach_milvus(recorder: tuple[Recorder, MilvusStore], index: Index) -> None:
    servicer, store = recorder
    check(index, dim=128, metric=Metric.IP, engine="milvus 2.6.0")
    store.create(Schema(collection="c", dim=128, metric=Metric.IP, id_type=IdType.INT64), index)

    assert servicer.index is not None
    sent = {pair.key: pair.value for pair in servicer.index.extra_params}
    assert sent == {"index_type": index.type, "metric_type": "IP", **as_text(dict(index.params))}
    assert servicer.index.field_name == "vector"

    [[hit]] = store.search("c", np.ones((1, 128), np.float32), limit=1, search=index.search)
    assert (hit.id, hit.distance) == (1, -0.5)
    assert servicer.search is not None
    assert as_text(searched(servicer)) == as_text(dict(index.search))
    assert servicer.search.consistency_level == common_pb2.ConsistencyLevel.Bounded
    assert not servicer.search.use_default_consistency


def test_parameters_that_must_cover_the_limit_are_raised_to_it(recorder: tuple[Recorder, MilvusStore]) -> None:
    servicer, store = recorder
    store.create(Schema(collection="c", dim=4, metric=Metric.IP, id_type=IdType.INT64), Index(type="HNSW"))
    store.search("c", np.ones((1, 4), np.float32), limit=1, search={"ef": 3}, strong=True)
    assert servicer.search is not None
    assert searched(servicer) == {"ef": 3}
    assert servicer.search.consistency_level == common_pb2.ConsistencyLevel.Strong
    store.search("c", np.ones((1, 4), np.float32), limit=50, search={"ef": 3})
    assert searched(servicer)["ef"] >= 50


@pytest.mark.parametrize("ef", [64, "64", 64.0, "64.0"])
def test_parameters_that_must_cover_the_limit_may_be_whole_numbers_in_any_form(
    recorder: tuple[Recorder, MilvusStore], ef: object
) -> None:
    servicer, store = recorder
    store.create(Schema(collection="c", dim=4, metric=Metric.IP, id_type=IdType.INT64), Index(type="HNSW"))
    check(Index(type="HNSW", search={"ef": ef}), dim=4, metric=Metric.IP, engine="")
    store.search("c", np.ones((1, 4), np.float32), limit=1, search={"ef": ef})
    assert searched(servicer) == {"ef": 64}


@pytest.mark.parametrize(("index", "most"), [("GPU_IVF_FLAT", 256), ("GPU_IVF_PQ", 1_024), ("GPU_CAGRA", 1_024)])
def test_a_short_answer_is_asked_for_again_within_what_the_index_gives(
    recorder: tuple[Recorder, MilvusStore], index: str, most: int
) -> None:
    """Each type of GPU index has a largest number of hits, and refuses a search for more."""
    servicer, store = recorder
    store.create(Schema(collection="c", dim=4, metric=Metric.IP, id_type=IdType.INT64), Index(type=index))
    store.search("c", np.ones((1, 4), np.float32), limit=200)
    assert servicer.wanted[0] == 200
    assert 200 < max(servicer.wanted[1:]) <= most


def test_the_parameters_of_an_index_that_another_client_made_are_read_too(recorder: tuple[Recorder, MilvusStore]) -> None:
    """pymilvus' ORM, Java, Go and Node send them as one value, `params`, and Milvus describes them so."""
    servicer, store = recorder
    store.create(Schema(collection="c", dim=4, metric=Metric.IP, id_type=IdType.INT64), Index(type="FLAT"))
    assert servicer.index is not None
    del servicer.index.extra_params[:]
    told = {"index_type": "IVF_FLAT", "metric_type": "IP", "params": json.dumps({"nlist": 1_024})}
    servicer.index.extra_params.extend(common_pb2.KeyValuePair(key=key, value=value) for key, value in told.items())
    found = store.index("c")
    assert (found.type, found.params) == ("IVF_FLAT", {"nlist": 1_024})
    assert reach(found).search == {"nprobe": 1_024}
    assert search_for(found, Index(type="IVF_FLAT", search={"nprobe": 256}), dim=4) == {"nprobe": 256}


def test_a_collection_that_has_lost_its_index_is_named(recorder: tuple[Recorder, MilvusStore]) -> None:
    servicer, store = recorder
    store.create(Schema(collection="c", dim=4, metric=Metric.IP, id_type=IdType.INT64), Index(type="FLAT"))
    assert store.index("c").type == "FLAT"
    servicer.index = None
    with pytest.raises(EngineError, match="Collection 'c' has no index on 'vector' any more; create one, and load it"):
        store.index("c")
