"""Model versions: load an embedder, probe it, register it, and recognise it later."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rmvdb import errors
from rmvdb.items.check import as_array, embed_checked, scored
from rmvdb.items.fingerprint import fingerprint
from rmvdb.items.kinds import KINDS, REQUIRED, Kind
from rmvdb.items.load import load_classifier, load_embedder
from rmvdb.items.probe import check_steady, probe_vectors, same_model
from rmvdb.items.query_embedder import QueryEmbedder, has_own_queries
from rmvdb.learning import hyperbolic
from rmvdb.protocols import Embedder
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import VersionRow
from rmvdb.types import Metric, Vectors


def add_version(
    registry: Registry,
    *,
    name: str,
    spec: str,
    options: Mapping[str, Any],
    classifier: str | None,
    metric: Metric,
    dim: int | None,
    kind: Kind | None,
    compatible_with: str | None = None,
) -> VersionRow:
    """Load the embedder, measure its dimension on probe items, fingerprint its weights, and register it.

    Adding the same version again changes nothing.

    Raises: ModelError if the embedder or the classifier cannot be loaded or used, Mismatch if the dimension is not `dim` or the
    version cannot be `compatible_with` that one, AlreadyExists if the name means another version.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise errors.UsageError(
            f"{name!r} cannot name a model version; use at most 100 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    embedder = load_embedder(spec, options)
    kind, probes, failures = probe(embedder, kind=kind)
    _check_probes(spec, probes, failures, metric=metric, dim=dim)
    if classifier is not None:
        loaded = load_classifier(classifier)
        if probes is not None:
            scored(loaded, probes[:REQUIRED])
    declared, dim = dim, dim if probes is None else probes.shape[1]
    if compatible_with is not None:
        _check_comparable(registry.version(compatible_with), name, dim, metric)
    return registry.add_version(
        name=name,
        embedder=spec,
        options=dict(options),
        classifier=classifier,
        dim=dim,
        metric=metric,
        fingerprint=fingerprint(embedder),
        probes=None if probes is None else probes.tobytes(),
        probe_kind=kind,
        query_probes=_query_probes(embedder, dim=dim, kind=kind, declared=declared is not None),
        base=None,
        head=None,
        compatible_with=compatible_with,
    )


def _check_probes(
    spec: str, probes: Vectors | None, failures: Mapping[Kind, errors.ModelError], *, metric: Metric, dim: int | None
) -> None:
    """Raise UsageError if nothing tells the dimension, Mismatch if the probe vectors do not fit `dim` or `metric`."""
    if probes is None:
        if dim is not None:
            return
        reasons = {str(failure): f"{each}s: {failure}" for each, failure in failures.items()}
        why = "; ".join(reasons.values() if len(reasons) > 1 else reasons)
        raise errors.UsageError(
            f"{spec!r} embeds neither the probe texts nor the probe images ({why}); if its items are neither, give its "
            "dimension: --dim N"
        )
    if dim is not None and probes.shape[1] != dim:
        raise errors.Mismatch(f"{spec!r} gives vectors of dimension {probes.shape[1]}, not {dim}; correct --dim or leave it out")
    if metric is Metric.LORENTZ and not hyperbolic.hold(probes[:REQUIRED]).all():
        raise errors.Mismatch(
            f"{spec!r} gives vectors that are not points (time, space) of a hyperboloid, where time² − ‖space‖² is one constant; "
            "end the model with rmvdb.learning.losses.lorentz.Lift, or register it with another --metric"
        )


def _check_comparable(old: VersionRow, name: str, dim: int | None, metric: Metric) -> None:
    for what, own, other in (("dimension", dim, old.dim), ("metric", metric, old.metric)):
        if own != other:
            raise errors.Mismatch(
                f"{name!r} has {what} {own}, {old.name!r} has {other}, so their vectors cannot be compared; "
                "leave --compatible-with out"
            )


def probe(embedder: Embedder, *, kind: Kind | None) -> tuple[Kind | None, Vectors | None, Mapping[Kind, errors.ModelError]]:
    """Return the kind of probe items that it embeds, its vectors of them, (probes, dim), and why it does not embed other kinds.

    If it embeds neither kind, kind and vectors are None.

    Raises: ModelError if it fails for the kind that you give.
    """
    failures: dict[Kind, errors.ModelError] = {}
    for each in (kind,) if kind else KINDS:
        try:
            vectors = probe_vectors(embedder, dim=_dim(embedder, each), kind=each)
        except errors.ModelError as exc:
            if kind:
                raise
            failures[each] = exc
        else:
            check_steady(embedder, vectors, kind=each)
            return each, vectors, failures
    return None, None, failures


def _dim(embedder: Embedder, kind: Kind) -> int:
    """Return the dimension that it gives for a probe item; 1 if it takes none, which `probe_vectors` then finds out."""
    try:
        return int(as_array(embedder.embed(KINDS[kind].probes()[:1])).shape[-1])
    except Exception:  # noqa: BLE001 (foreign code: whatever it raises, it does not take such items)
        return 1


def _query_probes(embedder: Embedder, *, dim: int | None, kind: Kind | None, declared: bool) -> bytes | None:
    """Return the probe vectors of `embed_queries`, empty if it takes no probe, None if the embedder has no such method.

    Raises: ModelError if its vectors are not of dimension `dim`, or if it takes no probe and no dimension was `declared`.
    """
    if dim is None or not has_own_queries(embedder):
        return None
    vectors, why = probe_queries(embedder, dim=dim, kind=kind)
    if vectors is None and not declared:
        raise errors.ModelError(
            f"embed_queries takes neither the probe texts nor the probe images ({why}); fix it, or if queries are neither, give "
            "the dimension: --dim N"
        )
    return b"" if vectors is None else vectors.tobytes()


def probe_queries(embedder: Embedder, *, dim: int, kind: Kind | None) -> tuple[Vectors | None, str]:
    """Return what `embed_queries` gives for the first kind of probes that it takes, (probes, dim), or None and the reasons.

    The kind of its records comes first, but texts may search pictures. Raises: ModelError if it gives another dimension than
    `dim`, or if it is not steady.
    """
    queries, reasons = QueryEmbedder(embedder, dim=dim), dict[str, None]()
    for each in dict.fromkeys((*([kind] if kind else []), *KINDS)):
        _, failed = embed_checked(queries, KINDS[each].probes()[:1], dim)
        if not failed:
            vectors = probe_vectors(queries, dim=dim, kind=each)
            check_steady(queries, vectors, kind=each)
            return vectors, ""
        reasons[failed[0]] = None
    return None, "; ".join(reasons)


def check_model(row: VersionRow, embedder: Embedder) -> bool:
    """Compare an embedder's weights and probe vectors, of records and of queries, with the registered ones.

    Return False if no probes of records were registered. A version without registered queries embeds them as records, so
    there is nothing to compare.

    Raises: ModelError if they differ.
    """
    weights = fingerprint(embedder)
    if row.fingerprint and weights != row.fingerprint and row.probes is not None:
        # It may load or convert its weights when it embeds first, as it did before it was registered.
        probe_vectors(embedder, dim=row.dim, kind=row.probe_kind)  # type: ignore[arg-type]
        weights = fingerprint(embedder)
    if row.fingerprint and weights != row.fingerprint:
        raise errors.ModelError(
            f"The weights of model version {row.name!r} are not the registered ones (SHA-256 {str(weights)[:12]}…, not "
            f"{row.fingerprint[:12]}…); put them back, or register the new ones as a version of their own"
        )
    check_probes(row, embedder)
    if row.query_probes is not None:
        _check_queries(row, row.query_probes, embedder)
    return row.probes is not None


def check_probes(row: VersionRow, embedder: Embedder) -> None:
    """Compare an embedder's probe vectors of records with the registered ones, if there are any.

    Raises: ModelError if they differ.
    """
    kind: Kind = row.probe_kind  # type: ignore[assignment]
    if row.probes is not None:
        _check_probes_again(row, "", row.probes, lambda: probe_vectors(embedder, dim=row.dim, kind=kind))


def _check_queries(row: VersionRow, known: bytes, embedder: Embedder) -> None:
    def again() -> Vectors:
        if not known:  # it took no probe
            return np.empty((0, row.dim), np.float32)
        vectors, why = probe_queries(embedder, dim=row.dim, kind=row.probe_kind)  # type: ignore[arg-type]
        if vectors is None:
            raise errors.ModelError(f"embed_queries fails for the probe items: {why}")
        return vectors

    if not has_own_queries(embedder):
        raise errors.ModelError(
            f"{row.embedder} has no embed_queries any more, by which {row.name!r} embeds queries; put it back, or register this "
            "model as a version of its own"
        )
    _check_probes_again(row, "embed_queries of ", known, again)


def _check_probes_again(row: VersionRow, part: str, probes: bytes, embed: Callable[[], Vectors]) -> None:
    """Raise ModelError if the embedder, or this part of it, gives other vectors for the probes, or none."""
    known = np.frombuffer(probes, np.float32).reshape(-1, row.dim)
    try:
        vectors = embed()
    except errors.ModelError as exc:
        raise errors.ModelError(f"{row.embedder} has changed since {row.name!r} was registered: {exc}") from exc
    if not same_model(known, vectors):
        raise errors.ModelError(
            f"{part}{row.embedder} gives other vectors for the probe items than when {row.name!r} was registered; put the old "
            "model and its preprocessing back, or register this one as a version of its own"
        )
