"""ψ, ρ and h: maps of vectors, applied by numpy alone and stored as safetensors. Most are networks that `network` trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from rmvdb.errors import ArtifactError, Mismatch
from rmvdb.learning import kept_pairs
from rmvdb.learning.kept_pairs import KeptConfig, KeptPairs
from rmvdb.learning.products import Linear
from rmvdb.types import Vectors

Floats = npt.NDArray[np.float32]

#: The length by which a vector without one is divided.
_LEAST = np.float32(1e-12)

FORMAT = 1
#: Settings that files of the first version do not have.
LATER = ("skip",)


class Norm(StrEnum):
    """The length of a transform's output."""

    #: `output_scale` for every vector: 1 for COSINE, the mean norm of the old gallery for IP.
    FIXED = "fixed"
    #: The input's length: a ρ for IP, which ranks a record by its length, too.
    KEPT = "kept"
    #: The network's own, times `output_scale`: L2.
    FREE = "free"
    #: The network gives the space of a point, and its time follows from that, all times `output_scale`, which is 1/√K: LORENTZ.
    LIFTED = "lifted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything besides the weights that applying a transform needs. It is in the file's metadata."""

    d_in: int
    d_out: int
    #: 1 to 5 blocks of Linear → BatchNorm → ReLU, the last one Linear only.
    blocks: int = 2
    #: Width between blocks.
    hidden: int = 256
    #: ρ(x) = x̂ + MLP(x̂), which starts at the identity.
    residual: bool = False
    #: ψ(x) = W x̂ + b + MLP(x̂), whose MLP starts at zero, so that ψ starts at a linear map.
    skip: bool = False
    #: h: before the blocks each input has two of its own, d → 2d → 2 d_out (Ramanujan et al., CVPR 2022).
    branches: bool = False
    #: Dimension of the side information after each input vector, (d_in + side,); 0 for none.
    side: int = 0
    #: Divides the inputs; None normalises them.
    input_scale: float | None = None
    output: Norm = Norm.FIXED
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.blocks <= 5:
            raise Mismatch(f"A transform has 1 to 5 blocks, not {self.blocks}; set blocks in that range")
        if self.residual and self.d_in != self.d_out:
            raise Mismatch(
                f"A residual transform keeps the dimension, but maps {self.d_in} to {self.d_out}; set residual to false"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The weights of a trained network, with each BatchNorm folded into the Linear before it."""

    config: Config
    #: float32, by their names in a file.
    arrays: dict[str, Floats]


class Trained(Protocol):
    """A network that training has made."""

    def weights(self) -> Weights:
        """Return its weights."""


class _Layers:
    """A network of folded weights, as arrays that numpy applies."""

    def __init__(self, weights: Weights) -> None:
        """Raise ValueError if the arrays are not those of the configuration."""
        self.config = config = weights.config
        shapes = _shapes(config)
        found = {name: (each.shape, each.dtype) for name, each in weights.arrays.items()}
        expected = {name: (shape, np.dtype(np.float32)) for name, shape in shapes.items()}
        if found != expected:
            odd = min(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            raise ValueError(f"its configuration does not fit its array {odd}")
        linears = {
            name.removesuffix(".weight"): Linear(array, weights.arrays[name.removesuffix("weight") + "bias"])
            for name, array in weights.arrays.items()
            if name.endswith(".weight")
        }
        #: In the memory that the layers use.
        self.arrays = {f"{name}.{part}": array for name, each in linears.items() for part, array in each.parts}
        self._branches = [[linears[name] for name in branch] for branch in _branches(config)]
        self._body = [linears[name] for name in _body(config)]
        self._skip = linears.get("skip")

    def apply(self, x: Vectors) -> Vectors:
        """Map (n, d_in + side) to (n, d_out)."""
        config = self.config
        side = x[:, config.d_in :] if config.side else None
        x = x if side is None else x[:, : config.d_in]
        length = _lengths(x)  # (n, 1)
        x = x / (length if config.input_scale is None else np.float32(config.input_scale))
        parts = [x] if side is None else [x, side / _lengths(side)]
        whole = x if side is None else np.concatenate(parts, axis=1)  # (n, d_in + side)
        if self._branches:
            inner = [_relu(_chain(branch, part)) for branch, part in zip(self._branches, parts, strict=True)]
            y = _chain(self._body, np.concatenate(inner, axis=1))
        else:
            y = _chain(self._body, whole)  # (n, d_out)
        if config.residual:
            y += whole[:, -y.shape[1] :]
        if self._skip is not None:
            y += self._skip(x)
        return self._scaled(y, length)

    def _scaled(self, y: Vectors, length: Vectors) -> Vectors:
        """Give outputs (n, d_out), or for LORENTZ (n, d_out - 1), the length that the configuration says."""
        config, scale = self.config, np.float32(self.config.output_scale)
        if config.output is Norm.FREE:
            return np.asarray(y * scale)
        if config.output is Norm.LIFTED:
            time = np.sqrt(1 + np.square(y).sum(axis=1, keepdims=True))
            return np.asarray(np.concatenate([time, y], axis=1) * scale)
        y *= (length if config.output is Norm.KEPT else scale) / _lengths(y)
        return y


def _branches(config: Config) -> list[list[str]]:
    """Return the names of the layers that each input has of its own."""
    inputs = (1 + bool(config.side)) if config.branches else 0
    return [[f"body.0.each.{number}.{layer}" for layer in (0, 2)] for number in range(inputs)]


def _body(config: Config) -> list[str]:
    return [f"body.{config.branches + 2 * block}" for block in range(config.blocks)]  # a ReLU stands between two


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array of a network."""
    made = config.d_out - (config.output is Norm.LIFTED)
    inputs = _branches(config)
    entry = 2 * config.d_out * len(inputs) or config.d_in
    chains = [(_body(config), [entry, *[config.hidden] * (config.blocks - 1), made])]
    chains += [
        (names, [width, 2 * width, 2 * config.d_out]) for names, width in zip(inputs, (config.d_in, config.side), strict=False)
    ]
    chains += [(["skip"], [config.d_in, made])] if config.skip else []
    shapes: dict[str, tuple[int, ...]] = {}
    for names, widths in chains:
        for name, (into, out) in zip(names, pairwise(widths), strict=True):
            shapes |= {f"{name}.weight": (out, into), f"{name}.bias": (out,)}
    return shapes


def _chain(layers: Sequence[Linear], x: Vectors) -> Vectors:
    """Apply one layer after the other, with a ReLU between two."""
    for number, layer in enumerate(layers):
        x = layer(_relu(x) if number else x)
    return x


def _relu(x: Vectors) -> Vectors:
    result: Vectors = np.maximum(x, 0, out=x)
    return result


def _lengths(x: Vectors) -> Vectors:
    """Return the lengths of vectors (n, d), at least 1e-12, as (n, 1)."""
    squares = np.matmul(x[:, None, :], x[:, :, None])[:, 0]  # (n, 1)
    result: Vectors = np.maximum(np.sqrt(squares, out=squares), _LEAST, out=squares)
    return result


class Transform:
    """A map from one vector space to another. It is immutable, and many threads may apply it."""

    def __init__(self, made: Trained | Weights | KeptPairs) -> None:
        """Take a trained network, its weights, or a map that keeps pairs. Raise ValueError for weights of another network."""
        if isinstance(made, KeptPairs):
            self._map: KeptPairs | _Layers = made
        else:
            self._map = _Layers(made if isinstance(made, Weights) else made.weights())
        self.config: Config | KeptConfig = self._map.config

    @property
    def linear(self) -> tuple[Floats, Floats] | None:
        """Return W (d_out, d_in) and b (d_out,) if, but for lengths, it maps x̂ to W x̂ + b: a ψ can start there. Else None."""
        plain = isinstance(self.config, Config) and replace(self.config, blocks=1, residual=False, skip=False, branches=False)
        if isinstance(self._map, KeptPairs) or self.config != plain:
            return None
        return self._map.arrays["body.0.weight"], self._map.arrays["body.0.bias"]

    def apply(self, vectors: Vectors) -> Vectors:
        """Map (n, d_in + side) to (n, d_out), float32, in order. Raise Mismatch for another dimension."""
        x = np.ascontiguousarray(vectors, dtype=np.float32)
        if x.ndim != 2 or x.shape[1] != self.config.d_in + self.config.side:
            width = f"{self.config.d_in} + {self.config.side}" if self.config.side else str(self.config.d_in)
            raise Mismatch(f"The transform takes vectors of shape (n, {width}), not {x.shape}; give it its model's vectors")
        with np.errstate(over="ignore", invalid="ignore"):  # too large a value becomes infinity, and is refused later
            return self._map.apply(x)

    def to_bytes(self) -> bytes:
        """Write arrays and configuration as safetensors. The same transform always gives the same bytes."""
        if isinstance(self._map, KeptPairs):
            config, arrays = self._map.to_parts()
            return safetensors.numpy.save(arrays, metadata=_metadata(config))
        # A later setting that changes nothing is left out, so that the file's SHA-256, its name, stays the same.
        config = {name: value for name, value in asdict(self.config).items() if value or name not in LATER}
        return safetensors.numpy.save(self._map.arrays, metadata=_metadata(config))

    @classmethod
    def from_bytes(cls, data: bytes) -> Transform:
        """Read what `to_bytes` wrote. Raise ArtifactError for anything else."""
        try:
            stored, arrays = _stored(data), safetensors.numpy.load(data)
            if stored.get("kind") == kept_pairs.KIND:
                return cls(KeptPairs.from_parts(stored, arrays))
            return cls(Weights(config=Config(**{**stored, "output": Norm(stored["output"])}), arrays=arrays))
        except (SafetensorError, KeyError, TypeError, ValueError, Mismatch) as exc:
            raise ArtifactError(f"The file is not a transform that this version reads ({exc}); restore it or plan again") from exc


def _metadata(config: dict[str, Any]) -> dict[str, str]:
    # A single key: safetensors writes several in varying order, and the file's name is its SHA-256.
    return {"config": json.dumps({"format": FORMAT, **config}, sort_keys=True)}


def _stored(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")  # safetensors: 8 bytes of length, then a JSON header
    stored: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["config"])
    if stored.pop("format") != FORMAT:
        raise ValueError("another format")
    return stored
