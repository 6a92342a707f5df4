"""Reads the data sets from a folder that the user names; nothing of them is kept in the project."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from rmvdb.errors import ItemError, UsageError

#: Height and width that the pictures of a folder are brought to.
MARKET, TINY = (128, 64), (64, 64)
#: Omniglot's 105 x 105 masks are averaged down to this side.
OMNIGLOT = 32
#: 0002_c1s1_000451_03.jpg: identity 2 from camera 1; −1 is junk, 0 a distractor.
MARKET_NAME = re.compile(r"(-1|\d{4})_c(\d)s\d_\d+_\d+\.jpg")


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Pictures of uint8 (n, 3, height, width), or features of them (n, width), and their classes or identities (n,)."""

    images: np.ndarray
    labels: np.ndarray
    #: (n,) where a camera's own pictures must not be found.
    cameras: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> Pictures:
        """The pictures of these rows."""
        cameras = None if self.cameras is None else self.cameras[rows]
        return Pictures(images=self.images[rows], labels=self.labels[rows], cameras=cameras)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set as published."""

    train: Pictures
    gallery: Pictures
    #: None: every picture of the gallery is searched for among the others.
    queries: Pictures | None = None
    #: (n,) what the training pictures can be told apart by beside the class, such as the alphabet; the class where None.
    families: np.ndarray | None = None
    #: Whether a mirrored picture is still of its class.
    mirrored: bool = True


def cifar100(folder: Path) -> DataSet:
    """As `load.py` of the folder reads it: `cifar100("train" or "test")` gives images (n, 32, 32, 3), labels and names."""
    load = _reader(folder, "cifar100")
    train, test = (_channels_first(*load(split)[:2]) for split in ("train", "test"))
    return DataSet(train=train, gallery=test)


def omniglot(folder: Path) -> DataSet:
    """As `load.py` reads it: 964 background characters to train on, 659 others to search."""
    ink, labels, _, names, background = _reader(folder, "omniglot")()
    images = np.concatenate([_smaller(part) for part in np.array_split(ink, max(1, len(ink) // 2000))])
    alphabets = np.unique([str(name).split("/")[0] for name in names], return_inverse=True)[1]
    known = np.asarray(background)[labels]
    return DataSet(
        train=Pictures(images=images[known], labels=labels[known]),
        gallery=Pictures(images=images[~known], labels=labels[~known]),
        families=alphabets[labels[known]],
        mirrored=False,
    )


def market1501(folder: Path) -> DataSet:
    """The published layout: bounding_box_train, bounding_box_test and query, identity and camera in each name."""
    train, gallery, queries = (_market(folder / name) for name in ("bounding_box_train", "bounding_box_test", "query"))
    return DataSet(train=train, gallery=gallery, queries=queries)


def tinyimagenet(folder: Path) -> DataSet:
    """The published layout: train/<class>/images/*.JPEG, and val/images with val/val_annotations.txt."""
    classes = sorted(path.name for path in _inside(folder / "train") if path.is_dir())
    numbers = {name: number for number, name in enumerate(classes)}
    taught = [(path, numbers[name]) for name in classes for path in _inside(folder / "train" / name / "images")]
    lines = (folder / "val" / "val_annotations.txt").read_text(encoding="utf-8").splitlines()
    found = [(folder / "val" / "images" / name, numbers[of]) for name, of, *_ in (line.split("\t") for line in lines)]
    return DataSet(train=_opened(taught, TINY), gallery=_opened(found, TINY))


def _market(folder: Path) -> Pictures:
    named = [(path, MARKET_NAME.fullmatch(path.name)) for path in _inside(folder) if path.suffix == ".jpg"]
    kept = [(path, match) for path, match in named if match and match[1] != "-1"]
    pictures = _opened([(path, int(match[1])) for path, match in kept], MARKET)
    return Pictures(images=pictures.images, labels=pictures.labels, cameras=np.array([int(match[2]) for _, match in kept]))


def _inside(folder: Path) -> Iterable[Path]:
    if not folder.is_dir():
        raise UsageError(f"{folder} is not there; --data names the folder that the data set was unpacked to")
    return sorted(folder.iterdir())


def _opened(files: list[tuple[Path, int]], size: tuple[int, int]) -> Pictures:
    if not files:
        raise UsageError("The folder of --data has no picture of the data set's layout; name the one it was unpacked to")
    images = np.stack([_pixels(path, size) for path, _ in files])
    return _channels_first(images, np.array([label for _, label in files]))


def _pixels(path: Path, size: tuple[int, int]) -> np.ndarray:
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB").resize(size[::-1]))
    except OSError as exc:
        raise ItemError(f"{path} cannot be read as a picture ({exc}); unpack the data set again") from exc


def _channels_first(images: np.ndarray, labels: np.ndarray) -> Pictures:
    return Pictures(images=np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels=np.asarray(labels, dtype=np.int64))


def _smaller(ink: np.ndarray) -> np.ndarray:
    """Masks (n, 105, 105) to grey pictures (n, 3, OMNIGLOT, OMNIGLOT)."""
    grey = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(ink).float(), OMNIGLOT)
    return (255 * grey).round().byte()[:, None].expand(-1, 3, -1, -1).numpy()


def _reader(folder: Path, name: str) -> Callable[..., Any]:
    path = folder / "load.py"
    if not path.is_file():
        raise UsageError(f"{path} is not there; name a folder whose load.py has {name}()")
    return runpy.run_path(str(path))[name]
