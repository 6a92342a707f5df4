"""Features of pictures, from frozen networks that others trained. A file keeps them by the SHA-256 of network and picture."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from examples.paper_tables.data import Pictures
from examples.paper_tables.tasks import Task
from examples.pretrained.files import Missing, place
from examples.pretrained.kept import Store, digest
from examples.pretrained.pictures import LITE0, LITE2, Lite, pixels
from rmvdb.errors import UsageError

#: A network sees BATCH pictures at once. After every PART pictures the example keeps their features and reports the progress.
BATCH, PART = 50, 500
#: The number of principal components of a network's features that heads see. The rest is mostly noise, and makes heads slow.
COMPONENTS = 256
#: Called with a sentence.
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Eye:
    """A frozen network in front of heads."""

    #: The name of the file with its features.
    file: str
    #: How many features a picture has.
    width: int
    #: The height and the width of the pictures that it sees.
    side: int
    network: Callable[[], nn.Module]


def _lite(net: Lite) -> Eye:
    return Eye(file=f"lite{net.number}-{net.side}-bfloat16", width=net.width, side=net.side, network=net.network)


#: The networks, by the names that recipes give them. A task has their features in this order, up to the last one that it needs.
EYES = {"lite0": _lite(LITE0), "lite2": _lite(LITE2)}


def columns(name: str) -> slice:
    """Return the columns of a network's components."""
    start = COMPONENTS * list(EYES).index(name)
    return slice(start, start + COMPONENTS)


def seen(task: Task, names: Sequence[str], say: Say) -> Task:
    """Return the task with features (n, COMPONENTS) of each network in place of its pictures.

    The pictures that the new model learns decide the components. Raises UsageError if a network cannot be downloaded.
    """
    needed = list(EYES)[: 1 + max(list(EYES).index(name) for name in names)]
    seers = [_Seer(name, say) for name in needed]
    bases = [_components(seer(task.new.images)) for seer in seers]

    def of(pictures: Pictures) -> Pictures:
        found = [(seer(pictures.images) - middle) @ base for seer, (middle, base) in zip(seers, bases, strict=True)]
        return replace(pictures, images=np.concatenate(found, axis=1))

    parts = {name: of(getattr(task, name)) for name in ("new", "old", "pairs", "gallery")}
    queries = None if task.queries is None else of(task.queries)
    return replace(task, **parts, queries=queries, steps=tuple(map(of, task.steps)))


def _components(found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean (width,) and the principal components (width, COMPONENTS) of features (n, width).

    If there are fewer components, the rest is zeros.
    """
    middle = found.mean(0)
    _, vectors = np.linalg.eigh(np.cov(found - middle, rowvar=False))
    base = vectors[:, ::-1][:, :COMPONENTS].astype(np.float32)
    return middle, np.pad(base, ((0, 0), (0, COMPONENTS - base.shape[1])))


class _Seer:
    """A network, and the features that it gave so far."""

    def __init__(self, name: str, say: Say) -> None:
        self.name, self.eye, self.say = name, EYES[name], say
        try:
            network = self.eye.network()
        except Missing as exc:
            raise UsageError(f"The features of {name} cannot be had: {exc}") from exc
        self.store = Store(place() / f"{self.eye.file}.sqlite", digest(network.state_dict()))
        self.network = network.eval().to(memory_format=torch.channels_last)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Map pictures (n, 3, h, w) of uint8 to features (n, width)."""
        keys = [hashlib.sha256(b"picture\0" + image.tobytes()).digest() for image in images]
        kept = self.store.read(keys)
        new = {key: image for key, image in zip(keys, images, strict=True) if key not in kept}
        began = time.perf_counter()
        for done, made in self._looked(new):
            self.store.write(made)
            kept.update(made)
            left = (time.perf_counter() - began) / done * (len(new) - done)
            self.say(f"{self.name}: {done:,} of {len(new):,} new pictures seen, {left / 60:.0f} min left")
        return np.stack([kept[key] for key in keys]) if keys else np.empty((0, self.eye.width), np.float32)

    def _looked(self, new: dict[bytes, np.ndarray]) -> Iterator[tuple[int, dict[bytes, np.ndarray]]]:
        """After each part, yield how many pictures are done, and its features. So a stopped command resumes from there."""
        keys = list(new)
        # Each batch has one thread. Several threads for one batch would wait for each other on a busy machine.
        with ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for start in range(0, len(keys), PART):
                part = keys[start : start + PART]
                batches = [part[at : at + BATCH] for at in range(0, len(part), BATCH)]
                found = pool.map(lambda batch: self._look([new[key] for key in batch]), batches)
                yield start + len(part), dict(zip(part, (row for rows in found for row in rows), strict=True))

    def _look(self, images: list[np.ndarray]) -> Any:
        """Compute features in bfloat16, as `backbones` does: 2.7 times as fast, with a cosine to float32 of 0.999."""
        seen = torch.stack([pixels(Image.fromarray(image.transpose(1, 2, 0)), self.eye.side) for image in images])
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return self.network(seen.to(memory_format=torch.channels_last)).float().numpy()
