"""Model versions: load an embedder, probe it, register it, and recognise it later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rmvdb import errors
from rmvdb.items.check import scored
from rmvdb.items.fingerprint import fingerprint
from rmvdb.items.kinds import KINDS, REQUIRED, Kind
from rmvdb.items.load import load_classifier, load_embedder
from rmvdb.items.probe import check_steady, probe_vectors, same_model
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
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise errors.UsageError(f"{name!r} cannot name a model version; use letters, digits, '.', '_' and '-'")
    embedder = load_embedder(spec, options)
    kind, probes, failures = probe(embedder, kind=kind)
    _check_probes(spec, probes, failures, metric=metric, dim=dim)
    if classifier is not None:
        loaded = load_classifier(classifier)
        if probes is not None:
            scored(loaded, probes[:REQUIRED])
    dim = dim if probes is None else probes.shape[1]
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
        return int(np.asarray(embedder.embed(KINDS[kind].probes()[:1])).shape[-1])
    except Exception:  # noqa: BLE001 (foreign code: whatever it raises, it does not take such items)
        return 1


def check_model(row: VersionRow, embedder: Embedder) -> bool:
    """Compare an embedder's weights and probe vectors with the registered ones. Return False if no probes were registered.

    Raises: ModelError if they differ.
    """
    if row.fingerprint and (weights := fingerprint(embedder)) != row.fingerprint:
        raise errors.ModelError(
            f"The weights of model version {row.name!r} are not the registered ones (SHA-256 {str(weights)[:12]}…, not "
            f"{row.fingerprint[:12]}…); put them back, or register the new ones as a version of their own"
        )
    if row.probes is None:
        return False
    known = np.frombuffer(row.probes, np.float32).reshape(-1, row.dim)
    try:
        vectors = probe_vectors(embedder, dim=row.dim, kind=row.probe_kind)  # type: ignore[arg-type]
    except errors.ModelError as exc:
        raise errors.ModelError(f"{row.embedder} has changed since {row.name!r} was registered: {exc}") from exc
    if not same_model(known, vectors):
        raise errors.ModelError(
            f"{row.embedder} gives other vectors for the probe items than when {row.name!r} was registered; put the old model "
            "and its preprocessing back, or register this one as a version of its own"
        )
    return True
