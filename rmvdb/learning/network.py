"""The network that ψ, ρ and h are while they are trained. Only this needs torch: a finished one is a few arrays."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from rmvdb.learning.transforms import Config, Norm, Weights


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

    def weights(self) -> Weights:
        """Return copies of its weights as a transform applies them."""
        state = self.folded().state_dict().items()
        return Weights(config=self.config, arrays={name: np.array(each.cpu().numpy(), np.float32) for name, each in state})

    def folded(self) -> Network:
        """Return the same map with every BatchNorm folded into its Linear, for inference only."""
        with torch.device("meta"):  # without storage: fresh weights would use up the caller's random numbers
            twin = Network(self.config, folded=True)
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
