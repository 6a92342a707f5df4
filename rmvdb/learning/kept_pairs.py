"""The map of the method `neighbours`: it keeps pairs, and numpy alone applies it.

A query is mapped to a point between the old vectors of its nearest pairs and its image under a centred orthogonal map, by a
weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rmvdb.errors import Mismatch
from rmvdb.types import Vectors

#: The `kind` in a file's configuration. Files of networks name none.
KIND = "kept_pairs"
#: The number of nearest pairs that map a query.
NEAREST = 10
#: Queries that are compared with the pairs at one time: beside the pairs, this bounds the memory.
CHUNK = 256

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptConfig:
    """Everything besides the arrays that applying the map needs. It is in the file's metadata."""

    d_in: int
    d_out: int
    #: w, the share of the nearest pairs beside the orthogonal map, from 0 to 1.
    weight: float
    #: τ of the softmax over half the squared distances; for vectors of length 1 that is q̂·x_i / τ.
    tau: float
    #: Divides the inputs; None normalises them.
    input_scale: float | None = None
    #: Whether both parts and the result are normalised (COSINE, IP), or keep their lengths (L2).
    normalises: bool = True
    output_scale: float = 1.0

    @property
    def side(self) -> int:
        """Return the dimension of the side information: this map takes none."""
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The arrays of the map, float32. Copies of one map with other settings share them."""

    #: μ_n, the mean of the new vectors, (d_in,).
    centre: Floats
    #: Of the orthogonal map, (d_in, d_out).
    rotation: Floats
    #: New vectors of the pairs, less μ_n, (n, d_in).
    new: Floats
    #: Their old vectors, less the mean of the old ones μ_o, (n, d_out).
    old: Floats
    #: The vector that is added at the end, (d_out,): μ_o for L2, whose distances depend on it, else 0.
    shift: Floats


class KeptPairs:
    """T(q) = Σ softmax over the 10 nearest pairs' old vectors; norm((1 − w)·norm((q̂ − μ_n)R) + w·norm(T(q) − μ_o)).

    For L2 nothing is normalised. Its file, and the memory of a process that applies it, take 4 · n · (d_in + d_out) bytes for n
    pairs: 20,000 pairs of 384 and 384 dimensions are 61 MB, of 1,280 and 1,280 they are 205 MB.
    """

    def __init__(self, config: KeptConfig, kept: Kept) -> None:
        """Take the arrays as they are. Raise Mismatch if their shapes do not fit."""
        n, (d_in, d_out) = len(kept.new), (config.d_in, config.d_out)
        shapes = {"centre": (d_in,), "rotation": (d_in, d_out), "new": (n, d_in), "old": (n, d_out), "shift": (d_out,)}
        for name, shape in shapes.items():
            array: Floats = getattr(kept, name)
            if array.shape != shape or not n:
                raise Mismatch(f"{name} of a map that keeps {n} pairs has the shape {array.shape}, not {shape}; fit it again")
            array.flags.writeable = False
        self.config, self.kept = config, kept
        self._half_squares: Floats = np.square(kept.new).sum(axis=1) / 2  # (n,)

    def apply(self, vectors: Vectors) -> Vectors:
        """Map (n, d_in) to (n, d_out), float32, in order."""
        made = np.empty((len(vectors), self.config.d_out), dtype=np.float32)
        for at in range(0, len(vectors), CHUNK):
            made[at : at + CHUNK] = self._apply(vectors[at : at + CHUNK])
        return made

    def _apply(self, q: Vectors) -> Vectors:
        config, kept = self.config, self.kept
        x = _unit(q) if config.input_scale is None else q / np.float32(config.input_scale)
        x = np.asarray(x - kept.centre, dtype=np.float32)  # (Q, d_in)
        carried, transported = x @ kept.rotation, self._transported(x)  # (Q, d_out) each
        if config.normalises:
            carried, transported = _unit(carried), _unit(transported)
        w = np.float32(config.weight)
        y: Floats = (1 - w) * carried + w * transported
        result: Vectors = (_unit(y) if config.normalises else y) * np.float32(config.output_scale) + kept.shift
        return result

    def _transported(self, x: Floats) -> Floats:
        """Return T(q) − μ_o, (Q, d_out)."""
        # −‖q − x_i‖²/2, without a part that is the same for every pair of one query: softmax cancels it.
        likeness = x @ self.kept.new.T - self._half_squares  # (Q, n)
        count = min(NEAREST, likeness.shape[1])
        nearest = np.argpartition(-likeness, count - 1, axis=1)[:, :count]  # (Q, 10)
        near = np.take_along_axis(likeness, nearest, axis=1)
        weights = np.exp((near - near.max(axis=1, keepdims=True)) / np.float32(self.config.tau))
        weights /= weights.sum(axis=1, keepdims=True)
        result: Floats = np.einsum("qk,qkd->qd", weights, self.kept.old[nearest])
        return result

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Floats]]:
        """Return the configuration and the arrays by name, as `from_parts` takes them."""
        return {"kind": KIND, **asdict(self.config)}, {name: getattr(self.kept, name) for name in Kept.__dataclass_fields__}

    @classmethod
    def from_parts(cls, config: Mapping[str, Any], arrays: Mapping[str, Floats]) -> KeptPairs:
        """Make the map again. Raise TypeError or Mismatch if `to_parts` did not make them."""
        settings = {name: value for name, value in config.items() if name != "kind"}
        return cls(KeptConfig(**settings), Kept(**{name: np.asarray(each, dtype=np.float32) for name, each in arrays.items()}))


def _unit(vectors: Vectors) -> Vectors:
    result: Vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    return result
