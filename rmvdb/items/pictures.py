"""Pictures from paths, bytes and arrays."""

from __future__ import annotations

import io
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rmvdb.errors import ItemError
from rmvdb.items.check import reason_of
from rmvdb.types import Item

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass
class PixelLimit:
    """The pixels of the largest picture that this process decodes: a small file may hold a picture of hundreds of MiB."""

    most: int = 50_000_000


pixel_limit = PixelLimit()

#: The formats that are read. The header of each says how large the picture is. Others hold a picture of another format, which may
#: be larger (ICNS, IPTC, BLP) or a program (EPS), or are decoded as soon as they are opened (ICO).
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "AVIF", "TIFF", "BMP", "DIB", "PPM", "JPEG2000", "TGA", "PCX", "SGI", "QOI")
#: Tags of TIFF.
_TILE_WIDTH, _TILE_LENGTH = 322, 323


def read_image(item: Item, *, mode: str = "RGB") -> Image:
    """Read the picture of a path, bytes, a uint8 array (height, width) or (height, width, channels), or a PIL image.

    Raises: ItemError if it cannot be read. If it has more pixels than `[items] max_pixels`, nothing of it is decoded.
    """
    from PIL import Image

    try:
        if isinstance(item, Image.Image):
            return _converted(decodable(item), mode)
        if isinstance(item, np.ndarray):
            return _converted(Image.fromarray(item[..., 0] if item.ndim == 3 and item.shape[2] == 1 else item), mode)
        file = io.BytesIO(item) if isinstance(item, (bytes, bytearray, memoryview)) else item
        if isinstance(file, str | Path) and not stat.S_ISREG(Path(file).stat().st_mode):
            raise ItemError("it is not a regular file")  # reading a pipe would block
        Image.init()
        with Image.open(file, formats=[each for each in FORMATS if each in Image.OPEN]) as image:  # Pillow 10 has no AVIF
            return _converted(decodable(image), mode)
    # A broken picture raises nearly anything: OSError, SyntaxError, struct.error, DecompressionBombError …
    except Exception as exc:
        name = str(item) if isinstance(item, (str, Path)) else f"An item of type {type(item).__name__}"
        raise ItemError(f"{name} cannot be read as a picture: {reason_of(exc)}") from exc


def _converted(image: Image, mode: str) -> Image:
    """Return the picture in that mode. Of 16 bits it keeps the upper 8; Pillow would make nearly all of them white."""
    from PIL.Image import fromarray

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # as older Pillows read PNG
        image = fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    return image.convert(mode)


def decodable(image: Image) -> Image:
    """Return the picture, of which PIL may have read the header alone. Raise ItemError if it is too large."""
    for width, height, whose in ((image.width, image.height, "it has"), (*_tile(image), "one of its tiles has")):
        if (pixels := width * height) > pixel_limit.most:
            raise ItemError(
                f"{whose} {width} × {height} = {pixels:,} pixels, and items.max_pixels is {pixel_limit.most:,}; make it smaller, "
                "or raise that setting"
            )
    return image


def _tile(image: Image) -> tuple[int, int]:
    """Return the size of a TIFF's tiles, which are decoded whole however small the picture is."""
    tags = getattr(image, "tag_v2", {}) if image.format == "TIFF" else {}
    width, height = (tags.get(number, 0) for number in (_TILE_WIDTH, _TILE_LENGTH))
    return (width, height) if isinstance(width, int) and isinstance(height, int) else (0, 0)


def read_item(item: Item) -> Item:
    """Read a Path, bytes or a uint8 array as a picture in RGB. Return a text, and everything else, unchanged."""
    if isinstance(item, (Path, bytes, bytearray, memoryview)):
        return read_image(item)
    if isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim in (2, 3):
        return read_image(item)
    if type(item).__module__.startswith("PIL."):
        return read_image(item)
    return item
