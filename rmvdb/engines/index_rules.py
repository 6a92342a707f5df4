"""Milvus' vector indexes and their parameters, checked before anything is created.

The table follows Milvus' documentation (milvus.io/docs, source milvus-io/milvus-docs, site/en/userGuide/indexes and
reference/index.md). If versions differ, the table has the wider range, and the server has the last word. An index that an engine
lacks is refused by the engine's name and version.

A search looks at part of a collection. `reach` says how it looks at as much as the index can, and what it is sure to find then.

GPU indexes compare by L2 or IP only: "Currently, GPU indexes do not support COSINE distance" (gpu-index-overview.md; Milvus
2.4.12 answers "metric type not found or not supported, supported: [L2 IP]", milvus issue 36605). gpu-ivf-pq.md names COSINE
all the same. It is refused here, too, because IP over normalised vectors gives the same order on every version.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from rmvdb.errors import ConfigError
from rmvdb.types import Index, Metric

_INT_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Range:
    """Numbers between two bounds; Milvus also accepts them as text."""

    low: float
    high: float = _INT_MAX
    whole: bool = True

    def allows(self, value: object) -> bool:
        number = _number(value)
        return number is not None and self.low <= number <= self.high and (not self.whole or number == int(number))

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} of at least {self.low:g}" if self.high == _INT_MAX else f"{kind} from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """One of a few words."""

    words: tuple[str, ...]

    def allows(self, value: object) -> bool:
        return (str(value).lower() if isinstance(value, bool) else value) in self.words

    def __str__(self) -> str:
        return " or ".join(self.words)


_Parameters = Mapping[str, _Range | _Choice]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """One index type."""

    build: _Parameters = field(default_factory=dict)
    search: _Parameters = field(default_factory=dict)
    required: tuple[str, ...] = ()
    #: Rules between parameters, or with the dimension: (index, dim) → the problem, "" if there is none.
    rules: tuple[Callable[[Index, int], str], ...] = ()
    metrics: tuple[Metric, ...] = (Metric.COSINE, Metric.IP, Metric.L2)
    #: Whether a filter is sure to find all that match, if each list is read, or each row if few match.
    filters: bool = True
    #: Whether the nearest records are sure to be found, if each list is read.
    exact: bool = False
    #: Whether its distances are too coarse to tell a record from its neighbours.
    coarse: bool = False
    #: The most hits of one search.
    most: int = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """What a search is sure to find if it looks at as much as the index can, however long it takes."""

    #: The parameters of such a search.
    search: Mapping[str, object] = field(default_factory=dict)
    #: Whether it finds every record that matches a filter.
    filters: bool = True
    #: Whether a record is among the nearest of its own vector. If the index is not `exact`, it may pass over a few.
    nearest: bool = True
    exact: bool = False
    #: The most hits that it may ask for.
    most: int = 16_384


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _value(values: Mapping[str, object], name: str, default: float) -> float:
    number = _number(values.get(name, default))
    return default if number is None else number


def _probes_fit(index: Index, dim: int) -> str:
    nlist, nprobe = _value(index.params, "nlist", 128), _value(index.search, "nprobe", 1)
    return f"search.nprobe = {nprobe:g} must not exceed params.nlist = {nlist:g}" if nprobe > nlist else ""


def _splits_evenly(index: Index, dim: int) -> str:
    m = int(_value(index.params, "m", 1))
    near = max((divisor for divisor in range(1, min(m, dim) + 1) if dim % divisor == 0), default=1)
    return f"params.m = {m} must divide the dimension, which is {dim}; {near} does" if dim % m else ""


def _degrees_fall(index: Index, dim: int) -> str:
    before, after = _value(index.params, "intermediate_graph_degree", 128), _value(index.params, "graph_degree", 64)
    return f"params.graph_degree = {after:g} must not exceed intermediate_graph_degree = {before:g}" if after > before else ""


def _cpu_search_has_ef(index: Index, dim: int) -> str:
    adapted = str(index.params.get("adapt_for_cpu", "")).lower() == "true"
    return "search.ef must be given where params.adapt_for_cpu is true" if adapted and "ef" not in index.search else ""


_FLAG = _Choice(words=("true", "false"))
_COUNT = _Range(low=1)
_LISTS = _Range(low=1, high=65_536)
_PQ: _Parameters = {"nlist": _LISTS, "m": _LISTS, "nbits": _Range(low=1, high=64)}
_PROBES: _Parameters = {"nprobe": _LISTS}
_GPU = (Metric.L2, Metric.IP)

#: `most` follows gpu-index-overview.md: 256 for GPU_IVF_FLAT, as Milvus 2.4 has it (1,024 since 2.5).
_KINDS: Mapping[str, _Kind] = {
    # docs.zilliz.com/docs/autoindex-explained: the level is Zilliz Cloud's; elsewhere AUTOINDEX has no parameters.
    "AUTOINDEX": _Kind(search={"level": _Range(low=1, high=10)}),
    # reference/index.md
    "FLAT": _Kind(exact=True),
    "IVF_FLAT": _Kind(build={"nlist": _LISTS}, search=_PROBES, rules=(_probes_fit,), exact=True),
    "IVF_SQ8": _Kind(build={"nlist": _LISTS}, search=_PROBES, rules=(_probes_fit,)),
    # ivf-pq.md
    "IVF_PQ": _Kind(build=_PQ, search=_PROBES, required=("m",), rules=(_probes_fit, _splits_evenly), coarse=True),
    # hnsw.md
    "HNSW": _Kind(build={"M": _Range(low=2, high=2048), "efConstruction": _COUNT}, search={"ef": _COUNT}),
    # reference/index.md, scann.md
    "SCANN": _Kind(
        build={"nlist": _LISTS, "with_raw_data": _FLAG}, search={"nprobe": _LISTS, "reorder_k": _COUNT}, rules=(_probes_fit,)
    ),
    # disk_index.md (search_list), diskann.md (the others, from Milvus 2.6 on; before, they are in milvus.yaml)
    "DISKANN": _Kind(
        build={
            "MaxDegree": _Range(low=1, high=512),
            "SearchListSize": _COUNT,
            "PQCodeBudgetGBRatio": _Range(low=0.0, high=0.25, whole=False),
            "SearchCacheBudgetGBRatio": _Range(low=0.0, high=0.3, whole=False),
        },
        search={"search_list": _COUNT, "SearchListSize": _COUNT, "BeamWidthRatio": _Range(low=1.0, high=128.0, whole=False)},
    ),
    # gpu-cagra.md
    "GPU_CAGRA": _Kind(
        build={
            "intermediate_graph_degree": _COUNT,
            "graph_degree": _COUNT,
            "build_algo": _Choice(words=("IVF_PQ", "NN_DESCENT")),
            "cache_dataset_on_device": _FLAG,
            "adapt_for_cpu": _FLAG,
        },
        search={
            "itopk_size": _COUNT,
            "search_width": _COUNT,
            "min_iterations": _Range(low=0),
            "max_iterations": _Range(low=0),
            "team_size": _Range(low=0, high=32),
            "ef": _COUNT,
        },
        rules=(_degrees_fall, _cpu_search_has_ef),
        metrics=_GPU,
        filters=False,  # no page says that it reads row by row where few match
        most=1_024,
    ),
    # gpu-ivf-flat.md
    "GPU_IVF_FLAT": _Kind(build={"nlist": _LISTS}, search=_PROBES, rules=(_probes_fit,), metrics=_GPU, exact=True, most=256),
    # gpu-ivf-pq.md
    "GPU_IVF_PQ": _Kind(
        build={**_PQ, "cache_dataset_on_device": _FLAG},
        search=_PROBES,
        required=("m",),
        rules=(_probes_fit, _splits_evenly),
        metrics=_GPU,
        coarse=True,
        most=1_024,
    ),
    # gpu-brute-force.md
    "GPU_BRUTE_FORCE": _Kind(metrics=_GPU, exact=True, most=4_096),
}

#: The index types of an engine, by the beginning of its version. An engine that is not here counts as having them all. Lite 3
#: accepts any name and builds others as well, which miss most matches of a filter, and many records beside deleted rows. A
#: server's version does not tell whether it has a GPU. GPU_CAGRA and GPU_BRUTE_FORCE came with Milvus 2.4.
_HAS: Mapping[str, tuple[str, ...]] = {
    "milvus-lite 2": ("AUTOINDEX", "FLAT", "IVF_FLAT"),
    "milvus-lite 3": ("AUTOINDEX", "FLAT"),
    "milvus 2.3.": tuple(name for name in _KINDS if name not in ("GPU_CAGRA", "GPU_BRUTE_FORCE")),
}
#: How many records a search keeps in mind that looks at as much as it can. An index with lists reads all of them.
_WIDE: Mapping[str, int] = {"ef": 512, "search_list": 512, "itopk_size": 512, "reorder_k": 1_024}
#: Milvus 2.3 refuses an index without these; later versions have defaults.
_NO_DEFAULT_IN_2_3 = ("nlist", "M", "efConstruction")


def check(index: Index, *, dim: int | None, metric: Metric | None, engine: str) -> None:
    """Check an index before it is created.

    `engine`: its name and version (`VectorStore.version`), "" if unknown. `dim`, `metric`: None before the first vector.

    Raises:
        ConfigError: The engine would refuse the index. The message names the parameter and its allowed values.
    """
    kind = _kind(index.type)
    _check_engine(index.type, engine)
    _check_values(f"{index.type} index: params", index.params, kind.build)
    _check_values(f"{index.type} index: search", index.search, kind.search)
    needed = kind.required + (_NO_DEFAULT_IN_2_3 if engine.startswith("milvus 2.3.") else ())
    for name in needed:
        if name in kind.build and name not in index.params:
            raise ConfigError(f"{index.type} index: params.{name} must be given; it is {kind.build[name]}")
    if dim is not None:
        _check_rules(index, kind, dim)
    if metric not in (None, *kind.metrics):
        raise ConfigError(
            f"{index.type} index: Milvus' GPU indexes do not support {metric}; "
            "normalise the vectors and compare them by IP, or take another index"
        )


def search_for(there: Index, chosen: Index, *, dim: int) -> Mapping[str, object]:
    """Return the chosen search parameters for an existing index; none if they are for another type.

    Raises:
        ConfigError: They are for this type and do not fit it.
    """
    if chosen.type != there.type:
        return {}
    kind = _kind(there.type)
    _check_values(f"{there.type} index: search", chosen.search, kind.search)
    if there.params:  # Lite 3 does not give them
        _check_rules(replace(there, search=chosen.search), kind, dim)
    return chosen.search


def reach(there: Index) -> Reach:
    """Return what searches with an existing index can be sure to find. Nothing is known of a type that is not in the table."""
    kind = _KINDS.get(there.type)
    if kind is None:
        return Reach(filters=False, nearest=False)
    names = {*kind.search, "ef"} if there.type == "AUTOINDEX" else kind.search  # HNSW, but on Zilliz Cloud and on GPUs
    search: dict[str, object] = {name: wide for name, wide in _WIDE.items() if name in names}
    if "nprobe" in kind.search:
        search["nprobe"] = int(_value(there.params, "nlist", 128))
    rough = str(there.params.get("with_raw_data", "")).lower() == "false"  # SCANN
    return Reach(search=search, filters=kind.filters, nearest=not (kind.coarse or rough), exact=kind.exact, most=kind.most)


def _kind(name: str) -> _Kind:
    if name not in _KINDS:
        raise ConfigError(f"index type {name!r} is not known; {_offer(name, _KINDS)}")
    return _KINDS[name]


def _check_rules(index: Index, kind: _Kind, dim: int) -> None:
    for rule in kind.rules:
        if problem := rule(index, dim):
            raise ConfigError(f"{index.type} index: {problem}")


def _check_engine(kind: str, engine: str) -> None:
    has = next((kinds for beginning, kinds in _HAS.items() if engine.startswith(beginning)), tuple(_KINDS))
    if kind not in has:
        lacks = "misses matches of a filter with an index" if "lite 3" in engine else "has no index"
        raise ConfigError(
            f"{engine} {lacks} of type {kind}; set index.type to one that it has: {', '.join(has)}"
            f"{', or use a Milvus server' if 'lite' in engine else ''}"
        )


def _check_values(place: str, values: Mapping[str, object], known: _Parameters) -> None:
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{place}.{name} is not known; {_offer(name, known)}")
        if not known[name].allows(value):
            raise ConfigError(f"{place}.{name} = {value!r} must be {known[name]}")


def _offer(name: str, known: Iterable[str]) -> str:
    names = list(known)
    folded = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), folded, n=1)
    if near:
        return f"did you mean {folded[near[0]]!r}?"
    return f"there are: {', '.join(names)}" if names else "there is nothing to set"
