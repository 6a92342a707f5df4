"""Networks that turn pictures of 32 x 32 and more into embeddings, without torchvision.

ResNets of He et al., CVPR 2016, with the stem that small pictures need: one convolution of 3 x 3, no pooling.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from rmvdb.errors import UnknownName

#: Bytes are brought to about −2 … 2.
MIDDLE, RANGE = 122.0, 64.0
#: Blocks of each stage of a ResNet.
RESNETS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
#: Channels of each stage of a small network.
SMALL = {"small": (32, 64, 128, 128), "small-wide": (48, 96, 192, 256)}


class Backbone(nn.Module):
    """Pictures of uint8 (n, 3, height, width) to embeddings (n, dim)."""

    def __init__(self, name: str, *, dim: int) -> None:
        super().__init__()
        self.body, width = _body(name)
        self.last = nn.Linear(width, dim)

    def forward(self, images: Tensor) -> Tensor:
        """The convolutions in bfloat16, the embedding in float32."""
        pixels = images.to(memory_format=torch.channels_last).float().sub(MIDDLE).div(RANGE)
        with torch.autocast(images.device.type, torch.bfloat16):
            features = self.body(pixels)  # (n, width)
        return self.last(features.float())


class Basic(nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut."""

    growth = 1

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_layer(into, width, 3, stride), *_layer(width, width, 3)[:-1])
        self.shortcut = _shortcut(into, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(n, into, h, w) to (n, width, h / stride, w / stride)."""
        return torch.relu(self.body(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 beside a shortcut."""

    growth = 4

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.growth
        self.body = nn.Sequential(*_layer(into, width, 1), *_layer(width, width, 3, stride), *_layer(width, out, 1)[:-1])
        self.shortcut = _shortcut(into, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(n, into, h, w) to (n, 4 width, h / stride, w / stride)."""
        return torch.relu(self.body(x) + self.shortcut(x))


def _body(name: str) -> tuple[nn.Sequential, int]:
    """Pixels (n, 3, h, w) to features (n, width), and that width."""
    if name in RESNETS:
        return _resnet(RESNETS[name], Bottleneck if name == "resnet50" else Basic)
    if name in SMALL:
        return _small(SMALL[name])
    raise UnknownName("backbone", name, [*RESNETS, *SMALL])


def _resnet(blocks: tuple[int, ...], block: type[Basic] | type[Bottleneck]) -> tuple[nn.Sequential, int]:
    layers: list[nn.Module] = _layer(3, 64, 3)
    into = 64
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(block(into, 64 << stage, 2 if stage and not number else 1))
            into = (64 << stage) * block.growth
    return nn.Sequential(*layers, *_pooled()), into


def _small(widths: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """Four convolutions, for a CPU: 32 x 32 pictures at some thousand a second and core."""
    layers: list[nn.Module] = _layer(3, widths[0], 4, 2)
    for number, (into, out) in enumerate(pairwise(widths)):
        layers += _layer(into, out, 3, 2 if number < 2 else 1)
    return nn.Sequential(*layers, *_pooled()), widths[-1]


def _layer(into: int, out: int, side: int, stride: int = 1) -> list[nn.Module]:
    padding = (side - 1) // 2
    return [nn.Conv2d(into, out, side, stride, padding, bias=False), nn.BatchNorm2d(out), nn.ReLU()]


def _shortcut(into: int, out: int, stride: int) -> nn.Module:
    if into == out and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))


def _pooled() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
