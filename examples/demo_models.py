"""The demo's two embedding models: small convolutional networks, trained here, kept as safetensors.

rmvdb model add v1 --embedder demo_models:embedder --options '{"weights": "v1.safetensors"}' \\
    --classifier demo_models:v1_classifier
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

import rmvdb

#: Cosines are multiplied by this before the softmax.
SCALE = 16.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a network; it travels in the metadata of its weights."""

    #: Pixels of a side, and 1 channel for grey or 3 for colour.
    side: int
    channels: int
    #: Channels of each block of convolution, BatchNorm, ReLU and pooling.
    widths: tuple[int, ...]
    #: Of the embedding.
    dim: int
    classes: int


class Net(nn.Module):
    """Images (n, channels, side, side) to embeddings (n, dim); `logits` compares them with one direction for each class."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        layers: list[nn.Module] = []
        for into, out in zip((shape.channels, *shape.widths), shape.widths, strict=False):
            layers += [nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]
        side = shape.side // 2 ** len(shape.widths)
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(shape.widths[-1] * side * side, shape.dim))
        self.directions = nn.Parameter(torch.randn(shape.classes, shape.dim) / shape.dim**0.5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self.body(images)
        return embeddings

    def logits(self, embeddings: torch.Tensor) -> torch.Tensor:
        """(n, dim) to (n, classes)."""
        return SCALE * functional.normalize(embeddings) @ functional.normalize(self.directions).T


def train(shape: Shape, images: np.ndarray, labels: np.ndarray, *, epochs: int, seed: int, batch: int = 128) -> tuple[Net, float]:
    """A network trained on images (n, side, side[, 3]) of uint8 with labels 0 … classes - 1, and its last epoch's accuracy."""
    torch.manual_seed(seed)
    net = Net(shape).train()
    x, y = _pixels(images), torch.from_numpy(labels)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    steps = epochs * -(-len(x) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for _ in range(epochs):
        right = 0
        for rows in torch.randperm(len(x)).tensor_split(-(-len(x) // batch)):
            logits = net.logits(net(_shifted(x[rows])))  # (batch, classes)
            right += int((logits.argmax(1) == y[rows]).sum())
            optimizer.zero_grad()
            functional.cross_entropy(logits, y[rows]).backward()
            optimizer.step()
            schedule.step()
    return net.eval(), right / len(x)


def _shifted(images: torch.Tensor) -> torch.Tensor:
    """The images moved by up to a sixteenth of a side, so that few images teach more."""
    reach = max(1, images.shape[-1] // 16)
    down, across = (int(each) for each in torch.randint(-reach, reach + 1, (2,)))
    return torch.roll(images, (down, across), (2, 3))


def _pixels(images: np.ndarray) -> torch.Tensor:
    """uint8 (n, side, side) or (n, side, side, 3) to float32 (n, channels, side, side) around 0."""
    found = torch.from_numpy(np.array(images)).float() / 127.5 - 1
    return found[:, None] if found.ndim == 3 else found.permute(0, 3, 1, 2).contiguous()


def save(net: Net, path: Path) -> None:
    """Weights and shape, never pickle."""
    save_file(net.state_dict(), path, metadata={"shape": json.dumps(asdict(net.shape))})


def load(path: Path | str) -> Net:
    """Return the network that `save` wrote."""
    with safe_open(path, "pt") as file:
        stored = json.loads(file.metadata()["shape"])
    net = Net(Shape(**{**stored, "widths": tuple(stored["widths"])}))
    net.load_state_dict(load_file(path))
    return net.eval()


def embedder(weights: str) -> rmvdb.TorchEmbedder:
    """The embedder of a network: what `--embedder demo_models:embedder --options '{"weights": …}'` makes."""
    net = load(weights)
    side, mode = net.shape.side, "L" if net.shape.channels == 1 else "RGB"

    def preprocess(image: object) -> torch.Tensor:
        picture = rmvdb.read_image(image, mode=mode).resize((side, side))
        return _pixels(np.asarray(picture)[None])[0]

    return rmvdb.TorchEmbedder(net, preprocess, dim=net.shape.dim, device="cpu", batch_size=256)


class Classifier:
    """How sure a network is of its class, from its embeddings alone: for the order classification-score."""

    def __init__(self, weights: str) -> None:
        self._net = load(weights)

    def scores(self, vectors: Sequence[Sequence[float]]) -> np.ndarray:
        """(n, dim) to probabilities (n, classes)."""
        with torch.inference_mode():
            logits = self._net.logits(torch.from_numpy(np.array(vectors, dtype=np.float32)))
            return logits.softmax(1).numpy()


def v1_classifier() -> Classifier:
    """The classifier of v1, whose weights lie in the current folder."""
    return Classifier("v1.safetensors")
