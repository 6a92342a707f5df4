"""ψ, ρ and h: maps of vectors, numpy at the border, stored as safetensors. Most are small networks, with torch inside."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from rmvdb.errors import ArtifactError, Mismatch
from rmvdb.learning import kept_pairs
from rmvdb.learning.kept_pairs import KeptConfig, KeptPairs
from rmvdb.types import Vectors

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


class Network(nn.Module):
    """The trainable part: the blocks, the residual, the linear map beside them, and the output's length."""

    def __init__(self, config: Config, *, folded: bool = False) -> None:
        """Make fresh weights. `folded` leaves BatchNorm out, for weights that already contain it."""
        super().__init__()
        self.config = config
        made = config.d_out - (config.output is Norm.LIFTED)
        widths = [config.d_in, *[config.hidden] * (config.blocks - 1), made]
        inputs: list[nn.Module] = []
        if config.branches:
            inputs = [_Branches(config, folded=folded)]
            widths[0] = 2 * config.d_out * (2 if config.side else 1)
        layers = _blocks(widths, folded=folded)
        self.body = nn.Sequential(*inputs, *layers)
        self.skip = nn.Linear(config.d_in, made) if config.skip else None
        if config.residual or config.skip:
            last = layers[-1]
            assert isinstance(last, nn.Linear)  # noqa: S101  the last block is Linear only
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, d_in + side) to (n, d_out)."""
        x, side = x[:, : self.config.d_in], x[:, self.config.d_in :]
        length = x.norm(dim=1, keepdim=True).clamp_min(1e-12)  # (n, 1)
        x = x / (length if self.config.input_scale is None else self.config.input_scale)
        if self.config.side:
            x = torch.cat([x, nn.functional.normalize(side, dim=1)], dim=1)
        y: Tensor = self.body(x)  # (n, d_out)
        if self.config.residual:
            y = x[:, -y.shape[1] :] + y
        if self.skip is not None:
            y = self.skip(x[:, : self.config.d_in]) + y
        if self.config.output is Norm.FREE:
            return y * self.config.output_scale
        if self.config.output is Norm.LIFTED:
            return torch.cat([(1 + y.square().sum(1, keepdim=True)).sqrt(), y], dim=1) * self.config.output_scale
        target = length if self.config.output is Norm.KEPT else self.config.output_scale
        return nn.functional.normalize(y, dim=1) * target

    def folded(self) -> Network:
        """Return the same map with every BatchNorm folded into its Linear, for inference only."""
        twin = _empty(self.config)
        layers, fused = list(self.body.eval().modules()), []
        for layer, following in zip(layers, [*layers[1:], nn.Identity()], strict=True):
            if isinstance(layer, nn.Linear):
                fused.append(fuse_linear_bn_eval(layer, following) if isinstance(following, nn.BatchNorm1d) else layer)
        linears = [layer for layer in twin.body.modules() if isinstance(layer, nn.Linear)]
        for linear, source in zip(linears, fused, strict=True):
            linear.load_state_dict(source.state_dict(), assign=True)
        if self.skip is not None and twin.skip is not None:
            twin.skip.load_state_dict(self.skip.state_dict(), assign=True)
        return twin


class _Branches(nn.Module):
    """Two blocks for the vector and two for its side information, side by side: (n, d_in + side) to (n, 2 d_out or 4 d_out)."""

    def __init__(self, config: Config, *, folded: bool) -> None:
        super().__init__()
        self.widths = [config.d_in, config.side] if config.side else [config.d_in]
        each = ([width, 2 * width, 2 * config.d_out] for width in self.widths)
        self.each = nn.ModuleList(nn.Sequential(*_blocks(widths, folded=folded, last=False)) for widths in each)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(x, self.widths, dim=1)
        return torch.cat([branch(part) for branch, part in zip(self.each, parts, strict=True)], dim=1)


def _blocks(widths: list[int], *, folded: bool, last: bool = True) -> list[nn.Module]:
    """Make Linear → BatchNorm → ReLU from each width to the next, with the `last` one Linear only."""
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out), nn.ReLU()] if folded else [nn.Linear(into, out), nn.BatchNorm1d(out), nn.ReLU()]
    return layers[: -1 if folded else -2] if last else layers


class Transform:
    """A map from one vector space to another. It is immutable, and many threads may apply it."""

    def __init__(self, made: Network | KeptPairs) -> None:
        """Take a trained network, or a map that keeps pairs. BatchNorm is folded away, so that one query takes few products."""
        self.config: Config | KeptConfig = made.config
        self._map = made if isinstance(made, KeptPairs) else made.folded().eval().requires_grad_(False).cpu()

    @property
    def linear(self) -> tuple[Tensor, Tensor] | None:
        """Return W (d_out, d_in) and b (d_out,) if, but for lengths, it maps x̂ to W x̂ + b: a ψ can start there. Else None."""
        plain = isinstance(self.config, Config) and replace(self.config, blocks=1, residual=False, skip=False, branches=False)
        if isinstance(self._map, KeptPairs) or self.config != plain:
            return None
        state = self._map.state_dict()
        return state["body.0.weight"], state["body.0.bias"]

    def apply(self, vectors: Vectors) -> Vectors:
        """Map (n, d_in + side) to (n, d_out), float32, in order. Raise Mismatch for another dimension."""
        x = np.ascontiguousarray(vectors, dtype=np.float32)
        if x.ndim != 2 or x.shape[1] != self.config.d_in + self.config.side:
            width = f"{self.config.d_in} + {self.config.side}" if self.config.side else str(self.config.d_in)
            raise Mismatch(f"The transform takes vectors of shape (n, {width}), not {x.shape}; give it its model's vectors")
        if isinstance(self._map, KeptPairs):
            return self._map.apply(x)
        if not x.flags.writeable:  # torch warns of read-only arrays
            x = x.copy()
        with torch.inference_mode():
            result: Vectors = self._map(torch.from_numpy(x)).numpy()
        return result

    def to_bytes(self) -> bytes:
        """Write arrays and configuration as safetensors. The same transform always gives the same bytes."""
        if isinstance(self._map, KeptPairs):
            config, arrays = self._map.to_parts()
            return safetensors.numpy.save(arrays, metadata=_metadata(config))
        # Settings that came later are left out where they change nothing: a file is named by its SHA-256, which stays.
        config = {name: value for name, value in asdict(self.config).items() if value or name not in LATER}
        return save(self._map.state_dict(), metadata=_metadata(config))

    @classmethod
    def from_bytes(cls, data: bytes) -> Transform:
        """Read what `to_bytes` wrote. Raise ArtifactError for anything else."""
        try:
            stored = _stored(data)
            if stored.get("kind") == kept_pairs.KIND:
                return cls(KeptPairs.from_parts(stored, safetensors.numpy.load(data)))
            network = _empty(Config(**{**stored, "output": Norm(stored["output"])}))
            network.load_state_dict(load(data), assign=True)
        except (SafetensorError, RuntimeError, KeyError, TypeError, ValueError, Mismatch) as exc:
            raise ArtifactError(f"The file is not a transform that this version reads ({exc}); restore it or plan again") from exc
        return cls(network)


def _empty(config: Config) -> Network:
    # Without storage: fresh weights would be discarded, and would use up the caller's random numbers.
    with torch.device("meta"):
        return Network(config, folded=True)


def _metadata(config: dict[str, Any]) -> dict[str, str]:
    # A single key: safetensors writes several in varying order, and the file's name is its SHA-256.
    return {"config": json.dumps({"format": FORMAT, **config}, sort_keys=True)}


def _stored(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")  # safetensors: 8 bytes of length, then a JSON header
    stored: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["config"])
    if stored.pop("format") != FORMAT:
        raise ValueError("another format")
    return stored
