"""ψ and ρ: small networks on vectors, torch inside and numpy at the border, stored as safetensors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from rmvdb.errors import ArtifactError, Mismatch
from rmvdb.types import Vectors

FORMAT = 1


class Norm(StrEnum):
    """What length a transform's output has."""

    #: `output_scale` for every vector: 1 for COSINE, the mean norm of the old gallery for IP.
    FIXED = "fixed"
    #: That of the input: a ρ for IP, where a record's length is part of its ranking.
    KEPT = "kept"
    #: Whatever the network gives, times `output_scale`: L2.
    FREE = "free"
    #: Whatever the network gives, times `output_scale`, is the space of a point whose time follows from it: LORENTZ, where
    #: `output_scale` is 1/√K.
    LIFTED = "lifted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All that is needed, beside the weights, to apply a transform; it travels in the file's metadata."""

    d_in: int
    d_out: int
    #: 1 to 5 blocks of Linear → BatchNorm → ReLU, the last one Linear only.
    blocks: int = 2
    #: Width between blocks.
    hidden: int = 256
    #: ρ(x) = x̂ + MLP(x̂), which starts at the identity.
    residual: bool = False
    #: Inputs are normalised where this is None, else divided by it.
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
    """The trainable part: blocks, the residual and the length of the output."""

    def __init__(self, config: Config, *, folded: bool = False) -> None:
        """Fresh weights; `folded` leaves BatchNorm out, for weights that already hold it."""
        super().__init__()
        self.config = config
        made = config.d_out - (config.output is Norm.LIFTED)
        widths = [config.d_in, *[config.hidden] * (config.blocks - 1), made]
        layers: list[nn.Module] = []
        for block, (into, out) in enumerate(pairwise(widths), start=1):
            layers.append(nn.Linear(into, out))
            if block < config.blocks:
                layers += [nn.ReLU()] if folded else [nn.BatchNorm1d(out), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        if config.residual:
            last = layers[-1]
            assert isinstance(last, nn.Linear)  # noqa: S101  the last block is Linear only
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(n, d_in) to (n, d_out)."""
        length = x.norm(dim=1, keepdim=True).clamp_min(1e-12)  # (n, 1)
        x = x / (length if self.config.input_scale is None else self.config.input_scale)
        y: Tensor = self.body(x)  # (n, d_out)
        if self.config.residual:
            y = x[:, -y.shape[1] :] + y
        if self.config.output is Norm.FREE:
            return y * self.config.output_scale
        if self.config.output is Norm.LIFTED:
            return torch.cat([(1 + y.square().sum(1, keepdim=True)).sqrt(), y], dim=1) * self.config.output_scale
        target = length if self.config.output is Norm.KEPT else self.config.output_scale
        return nn.functional.normalize(y, dim=1) * target

    def folded(self) -> Network:
        """The same map with every BatchNorm folded into its Linear; for inference only."""
        twin = _empty(self.config)
        layers, fused = list(self.body.eval()), []
        for layer, following in zip(layers, [*layers[1:], nn.Identity()], strict=True):
            if isinstance(layer, nn.Linear):
                fused.append(fuse_linear_bn_eval(layer, following) if isinstance(following, nn.BatchNorm1d) else layer)
        linears = [layer for layer in twin.body if isinstance(layer, nn.Linear)]
        for linear, source in zip(linears, fused, strict=True):
            linear.load_state_dict(source.state_dict(), assign=True)
        return twin


class Transform:
    """A trained map from one vector space to another; immutable, and safe to apply from many threads."""

    def __init__(self, network: Network) -> None:
        """Take a trained network; BatchNorm is folded away, so that one query takes a few matrix products."""
        self.config = network.config
        self._network = network.folded().eval().requires_grad_(False).cpu()

    def apply(self, vectors: Vectors) -> Vectors:
        """(n, d_in) to (n, d_out), float32, in order; raises Mismatch for another dimension."""
        x = np.ascontiguousarray(vectors, dtype=np.float32)
        if x.ndim != 2 or x.shape[1] != self.config.d_in:
            raise Mismatch(
                f"The transform takes vectors of shape (n, {self.config.d_in}), not {x.shape}; give it its model's vectors"
            )
        if not x.flags.writeable:  # torch warns of an array that it could write to by mistake
            x = x.copy()
        with torch.inference_mode():
            result: Vectors = self._network(torch.from_numpy(x)).numpy()
        return result

    def to_bytes(self) -> bytes:
        """Weights and configuration as safetensors; the same transform always gives the same bytes."""
        # One key only: safetensors writes several in no fixed order, and the file's SHA-256 is its name.
        config = json.dumps({"format": FORMAT, **asdict(self.config)}, sort_keys=True)
        return save(self._network.state_dict(), metadata={"config": config})

    @classmethod
    def from_bytes(cls, data: bytes) -> Transform:
        """Read what `to_bytes` wrote; raises ArtifactError for anything else."""
        try:
            config = _config(data)
            network = _empty(config)
            network.load_state_dict(load(data), assign=True)
        except (SafetensorError, RuntimeError, KeyError, TypeError, ValueError, Mismatch) as exc:
            raise ArtifactError(f"The file is not a transform that this version reads ({exc}); restore it or plan again") from exc
        return cls(network)


def _empty(config: Config) -> Network:
    # Without storage: fresh weights would be thrown away, and would draw from the caller's random numbers.
    with torch.device("meta"):
        return Network(config, folded=True)


def _config(data: bytes) -> Config:
    size = int.from_bytes(data[:8], "little")  # safetensors: 8 bytes of length, then a JSON header
    stored = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["config"])
    if stored.pop("format") != FORMAT:
        raise ValueError("another format")
    return Config(**{**stored, "output": Norm(stored["output"])})
