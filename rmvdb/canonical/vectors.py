"""Vectors: numbers that the metric can rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from rmvdb.errors import Mismatch
from rmvdb.types import Metric, Record, Schema, Vectors

#: The squared lengths of vectors that every engine ranks. Below, COSINE divides by a number that is 0 in float32 (measured from
#: 1e-22 on). Above, a squared distance may be infinite, and no search finds the record.
_SHORTEST, _LONGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max) / 4


def vector_of(schema: Schema, record: Record, *, as_read: bool) -> Vectors:
    """Return the record's vector (dim,), float32. A vector that was read from a collection may be unrankable there, too.

    Raises:
        Mismatch: the collection cannot hold it, or its metric cannot rank it.
    """
    with np.errstate(over="ignore"):  # too large a value becomes infinity
        vector = np.asarray([] if record.vector is None else record.vector, dtype=np.float32)
    name, dim = schema.collection, schema.dim
    if vector.shape != (dim,) or not np.isfinite(vector).all():
        problem = f"shape {vector.shape}" if vector.shape != (dim,) else "values that are not finite"
        raise Mismatch(f"Record {record.id!r} has a vector with {problem}; {name!r} takes {dim} finite numbers")
    if not as_read and (why := unrankable(vector[None], schema.metric)):
        raise Mismatch(f"Record {record.id!r} has a vector that {why[0]}; correct what made it")
    return vector


def queries_of(schema: Schema, vectors: Vectors) -> Vectors:
    """Return query vectors (n, dim), float32.

    Raises:
        Mismatch: they have another dimension, or the metric cannot rank by them.
    """
    with np.errstate(over="ignore"):
        queries = np.ascontiguousarray(vectors, dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] != schema.dim:
        name, dim = schema.collection, schema.dim
        raise Mismatch(f"Collection {name!r} has vectors of dimension {dim}; the queries have shape {queries.shape}")
    for at, why in unrankable(queries, schema.metric).items():
        which = "The query" if len(queries) == 1 else f"Query {at} of {len(queries)}"
        raise Mismatch(f"{which} has a vector that {why}; correct what made it")
    return queries


def unrankable(vectors: npt.NDArray[np.floating[Any]], metric: Metric) -> dict[int, str]:
    """Return, by row of `vectors` (n, dim), why the metric cannot rank it."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.square(vectors.astype(np.float64)).sum(axis=1)  # (n,)
    shortest = _SHORTEST if metric is Metric.COSINE else 0.0
    odd = np.flatnonzero(~((squares >= shortest) & (squares <= _LONGEST)))
    return {int(at): _why_unrankable(float(squares[at]), metric) for at in odd}


def _why_unrankable(square: float, metric: Metric) -> str:
    if not math.isfinite(square):
        return "has values that are not finite"
    if square > _LONGEST:
        return f"has the length {math.sqrt(square):.1e}, whose square is too large for a distance"
    return f"has the length {math.sqrt(square):.1g}, and so no direction that {metric.value} could compare"
