"""Pictures are read in every form, and those that are broken or too large are refused before they are decoded."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rmvdb.app.settings import ItemsSection
from rmvdb.errors import ItemError
from rmvdb.items.digest import item_digest
from rmvdb.items.kinds import KINDS
from rmvdb.items.pictures import pixel_limit, read_image
from rmvdb.items.torch import TorchEmbedder
from tests.support.embedders import pictures, pixels, small_net


def test_a_picture_can_be_a_path_bytes_an_array_or_a_picture(tmp_path: Path) -> None:
    picture = pictures(1)[0]
    picture.save(tmp_path / "1.png")
    file = io.BytesIO()
    picture.save(file, "PNG")
    items = [tmp_path / "1.png", file.getvalue(), bytearray(file.getvalue()), np.asarray(picture), picture]
    vectors = TorchEmbedder(small_net(), pixels, device="cpu").embed(items)
    np.testing.assert_allclose(vectors, np.repeat(vectors[:1], 5, axis=0), atol=1e-6)
    assert read_image(str(tmp_path / "1.png")).tobytes() == picture.tobytes()


def test_pictures_of_all_kinds_become_rgb() -> None:
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"):
        assert read_image(Image.new(mode, (3, 2))).mode == "RGB"
    assert read_image(np.zeros((2, 3), np.uint8)).size == (3, 2)
    assert read_image(np.zeros((2, 3), np.uint8), mode="L").mode == "L"


@pytest.mark.parametrize(("kind", "order"), [("PNG", "<u2"), ("TIFF", "<u2"), ("TIFF", ">u2")])
def test_a_grey_picture_of_16_bits_keeps_its_levels(kind: str, order: str) -> None:
    """Pillow alone makes everything above 255 white."""
    ramp = (np.arange(256, dtype=np.uint16) << 8).reshape(16, 16)
    file = io.BytesIO()
    Image.fromarray(ramp.astype(order)).save(file, kind)
    assert np.array_equal(np.asarray(read_image(file.getvalue(), mode="L")), ramp >> 8)


def test_a_grey_array_may_have_a_channel_of_its_own() -> None:
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert np.array_equal(np.asarray(read_image(grey[..., None], mode="L")), grey)


def test_a_pillow_that_lacks_a_format_reads_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Image.init()
    monkeypatch.delitem(Image.OPEN, "AVIF")
    file = io.BytesIO()
    Image.new("L", (3, 2)).save(file, "BMP")
    assert read_image(file.getvalue()).size == (3, 2)


@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\n broken", None])
def test_a_picture_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "7.jpg"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ItemError, match=r"7\.jpg cannot be read as a picture: "):
        read_image(file)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "JPEG", "WEBP", "TIFF", "BMP"])
def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file = io.BytesIO()
    Image.new("L", (250, 250)).save(file, kind)
    (path := tmp_path / "picture").write_bytes(file.getvalue())
    assert read_image(path).size == (250, 250)
    monkeypatch.setattr(pixel_limit, "most", 62_499)

    def decode(*_: Any) -> None:
        raise AssertionError("decoded")

    for each in (path, file.getvalue(), Image.open(path)):
        monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decode)
        with pytest.raises(ItemError, match=r"250 × 250 = 62,500 pixels, and items.max_pixels is 62,499"):
            read_image(each)
        assert item_digest(each) is None or not isinstance(each, Image.Image)
        monkeypatch.undo()
        monkeypatch.setattr(pixel_limit, "most", 62_499)
    each.close()


def test_a_program_or_a_file_that_opening_decodes_is_not_a_picture() -> None:
    file = io.BytesIO()
    Image.new("L", (16, 16)).save(file, "ICO")
    for data in (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n showpage\n", file.getvalue()):
        with pytest.raises(ItemError, match="cannot identify image file"):
            read_image(data)


def nested_in_iptc(data: bytes) -> bytes:
    """An IPTC record of 16 × 16 pixels that holds a picture of any format; PIL opens that with whatever reads it."""
    parts = [data[at : at + 8000] for at in range(0, len(data), 8000)]
    fields = [(3, 20, b"\0\x10"), (3, 30, b"\0\x10"), (3, 60, b"\1\0"), (3, 120, b"\5"), *((8, 10, part) for part in parts)]
    return b"".join(bytes([0x1C, record, number, *len(part).to_bytes(2)]) + part for record, number, part in fields)


def test_a_file_that_holds_a_picture_of_another_format_is_refused() -> None:
    """Its own header says nothing of how large that is, nor that it is no program."""
    larger, icns = io.BytesIO(), io.BytesIO()
    Image.new("L", (3000, 3000)).save(larger, "PNG")
    Image.new("RGBA", (128, 128)).save(icns, "ICNS")
    nested = nested_in_iptc(larger.getvalue())
    with Image.open(io.BytesIO(nested)) as opened:
        assert opened.size == (16, 16)
        opened.load()
        assert opened.im.size == (3000, 3000)
    for data in (nested, icns.getvalue()):
        with pytest.raises(ItemError, match="cannot identify image file"):
            read_image(data)


def test_a_small_picture_in_large_tiles_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """420 KB of a TIFF took 417 MiB."""
    side = 1600
    data = zlib.compress(bytes(side * side * 3))
    tags = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 2), (277, 3), (322, side), (323, side), (324, 8), (325, len(data))]
    rows = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    tiff = b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + rows + bytes(4)
    assert read_image(tiff).size == (16, 16)
    monkeypatch.setattr(pixel_limit, "most", side * side - 1)
    with pytest.raises(ItemError, match="one of its tiles has 1600 × 1600 = 2,560,000 pixels"):
        read_image(tiff)


def test_a_picture_cut_short_is_not_embedded_in_grey(tmp_path: Path) -> None:
    file = tmp_path / "7.jpg"
    Image.effect_noise((200, 200), 50).convert("RGB").save(file)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ItemError, match="truncated"):
        read_image(file)


def test_the_least_limit_allows_the_pictures_by_which_a_model_is_known() -> None:
    """Under a smaller one every model would seem to have changed."""
    least = min(each.ge for each in ItemsSection.model_fields["max_pixels"].metadata if hasattr(each, "ge"))
    known = [each for each in (*KINDS["image"].probes(), *KINDS["image"].more()) if isinstance(each, Image.Image)]
    assert 0 < max(each.width * each.height for each in known) <= least
