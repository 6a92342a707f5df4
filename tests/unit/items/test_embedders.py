"""An embedder is used as it is meant to be; one bad item is singled out, a bad model stops everything."""

from __future__ import annotations

import hashlib
import io
import re
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rmvdb.catalog.versions import probe
from rmvdb.errors import ItemError, ModelError, UsageError
from rmvdb.items.check import CheckedEmbedder, embed_checked, scored
from rmvdb.items.digest import item_digest
from rmvdb.items.fingerprint import fingerprint
from rmvdb.items.kinds import KINDS
from rmvdb.items.load import load_embedder
from rmvdb.items.pictures import pixel_limit, read_image, read_item
from rmvdb.items.probe import probe_vectors, same_model
from rmvdb.items.torch import TorchEmbedder
from rmvdb.types import Item, Vectors

REPOSITORY = Path(__file__).parents[3]
USER_MODULE = """
import numpy as np
import torch

class Embedder:
    def __init__(self, scale=1.0, *, dim=2):
        if scale < 0:
            raise ValueError("no negative scale")
        self.scale, self.dim = scale, dim
    def embed(self, items):
        return np.full((len(items), self.dim), self.scale)

def make(scale=2.0):
    return Embedder(scale)

def nothing():
    return None

def function(items):
    return items

class Holder:
    inner = Embedder(5.0)

ready = Embedder(3.0)
module = torch.nn.Linear(2, 2)
number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    (tmp_path / "usermodels.py").write_text(USER_MODULE)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("usermodels", None)


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((8, 8)), np.float32)).permute(2, 0, 1) / 255


def small_net(*, seed: int = 0, dim: int = 4) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5), torch.nn.Flatten(), torch.nn.Linear(144, dim)
    )


def pictures(n: int) -> list[Image.Image]:
    values = np.random.default_rng(0).integers(0, 256, (n, 16, 16, 3), dtype=np.uint8)
    return [Image.fromarray(value) for value in values]


class Words:
    """Embeds texts; `bad` raises and `nan` gives NaN, as real embedders do."""

    def __init__(self, *, dim: int = 3) -> None:
        self.dim = dim
        self.calls = 0

    def embed(self, items: Sequence[Item]) -> Vectors:
        self.calls += 1
        if "bad" in items:
            raise ValueError("bad cannot be read")
        vectors = np.array([[len(item), hash_of(item), 1][: self.dim] for item in items], np.float32).reshape(-1, self.dim)
        vectors[[item == "nan" for item in items], 0] = np.nan
        vectors[[item == "inf" for item in items], 1] = -np.inf
        return vectors


def hash_of(text: str) -> int:
    return sum(map(ord, text)) % 97


class Gives:
    """An embedder that gives what it was told to."""

    def __init__(self, output: Callable[[Sequence[Item]], Any]) -> None:
        self.embed = output


# Loading


@pytest.mark.parametrize(
    ("spec", "options", "value"),
    [
        ("usermodels:ready", {}, 3.0),
        ("usermodels:Embedder", {}, 1.0),
        ("usermodels:Embedder", {"scale": 4.0, "dim": 3}, 4.0),
        ("usermodels:make", {}, 2.0),
        ("usermodels:make", {"scale": 7.0}, 7.0),
        ("usermodels:Holder.inner", {}, 5.0),
    ],
)
def test_an_embedder_is_an_object_or_what_makes_one(folder: Path, spec: str, options: dict[str, Any], value: float) -> None:
    assert load_embedder(spec, options).embed(["x"])[0, 0] == value


@pytest.mark.parametrize(
    ("spec", "options", "problem"),
    [
        ("usermodels:missing", {}, r"has no 'missing'; check the name after the colon"),
        ("nomodule:x", {}, r"There is no module 'nomodule' in .*; run from its folder or install it"),
        ("usermodels:Embedder", {"size": 3}, r"cannot be made with options \['size'\]: .*'size'; correct the options"),
        ("usermodels:Embedder", {"scale": -1}, r"fails to load: ValueError: no negative scale"),
        ("usermodels:nothing", {}, r"gives a NoneType without embed\(items\); give it a method"),
        ("usermodels:function", {}, r"cannot be made with options \[\]: missing a required argument"),
        ("usermodels:number", {}, r"gives a int without embed\(items\)"),
        ("usermodels:module", {}, r"gives a Linear without embed\(items\); wrap it: TorchEmbedder\(module, preprocess\)"),
        ("usermodels:ready", {"scale": 3}, r"takes no options; remove scale"),
    ],
)
def test_an_object_that_is_not_an_embedder_is_named(folder: Path, spec: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        load_embedder(spec, options)


@pytest.mark.parametrize("spec", ["", "usermodels", "usermodels:", ":ready", "usermodels.ready", "a b:c", "os:system('x')"])
def test_a_spec_has_a_module_and_a_name(spec: str) -> None:
    with pytest.raises(UsageError, match=r"does not name an object; write package\.module:object"):
        load_embedder(spec)


def test_finding_embedders_and_sources_does_not_load_torch() -> None:
    script = "import sys; from rmvdb.items import kinds, sources; kinds.KINDS['text'].probes(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.strip() == "False"


# Torch modules


def test_a_torch_module_embeds_in_batches_as_it_would_one_by_one() -> None:
    module = small_net()
    embedder = TorchEmbedder(module, pixels, dim=4, device="cpu", batch_size=3)
    items = pictures(8)
    vectors = embedder.embed(items)
    with torch.no_grad():
        expected = module.eval()(torch.stack([pixels(item) for item in items])).numpy()
    assert (vectors.dtype, vectors.shape) == (np.float32, (8, 4))
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    np.testing.assert_array_equal(embedder.embed(items), vectors)
    assert embedder.embed([]).shape == (0, 4)


def test_a_torch_module_gives_float32_whatever_it_computes_in() -> None:
    module = torch.nn.Linear(2, 2).to(torch.bfloat16)
    embedder = TorchEmbedder(module, lambda item: torch.tensor(item, dtype=torch.bfloat16), device="cpu")
    assert embedder.embed([[1.0, 2.0]]).dtype == np.float32


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


def test_texts_and_features_reach_the_preprocessing_as_they_are() -> None:
    assert read_item("photos/1.jpg") == "photos/1.jpg"
    features = np.zeros(3, np.float32)
    assert read_item(features) is features
    letters = TorchEmbedder(torch.nn.Embedding(128, 2), lambda text: ord(text[0]), device="cpu")
    assert letters.embed(["a", "b"]).shape == (2, 2)


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


def test_a_module_of_another_dimension_is_refused() -> None:
    with pytest.raises(ModelError, match=r"gives shape \(2, 4\) for 2 items and must give \(2, 5\)"):
        TorchEmbedder(small_net(), pixels, dim=5, device="cpu").embed(pictures(2))
    with pytest.raises(ModelError, match=r"must give \(2, dim\)"):
        TorchEmbedder(torch.nn.Identity(), pixels, device="cpu").embed(pictures(2))


def test_many_threads_use_one_module() -> None:
    embedder = TorchEmbedder(small_net(), pixels, device="cpu", batch_size=2)
    items = pictures(12)
    expected = embedder.embed(items)
    found: list[Vectors] = []
    threads = [threading.Thread(target=lambda: found.append(embedder.embed(items))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for vectors in found:
        np.testing.assert_array_equal(vectors, expected)


def test_the_best_device_is_chosen_and_gives_the_same_vectors() -> None:
    items = pictures(5)
    on_cpu = TorchEmbedder(small_net(), pixels, device="cpu").embed(items)
    embedder = TorchEmbedder(small_net(), pixels)
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert embedder.device.type == best
    assert same_model(on_cpu, embedder.embed(items), tolerance=1e-5)


# Checking


def test_good_items_are_embedded_in_one_call() -> None:
    embedder = Words()
    vectors, failed = embed_checked(embedder, ["a", "bb", "ccc"], 3)
    assert failed == {}
    assert vectors[:, 0].tolist() == [1, 2, 3]
    assert embedder.calls == 1


@given(items=st.lists(st.sampled_from(["a", "bb", "bad", "nan", "inf"]), max_size=40))
@settings(deadline=None)
def test_exactly_the_bad_items_fail_and_all_others_have_their_vector(items: list[str]) -> None:
    bad = {index for index, item in enumerate(items) if item in ("bad", "nan", "inf")}
    if len(items) > 1 and len(bad) == len(items):
        with pytest.raises(ModelError, match=f"fails for each of {len(items)} items"):
            embed_checked(Words(), items, 3)
        return
    vectors, failed = embed_checked(Words(), items, 3)
    assert set(failed) == bad
    for index, item in enumerate(items):
        if index in bad:
            assert np.isnan(vectors[index]).all()
            assert ("ValueError: bad cannot be read" if item == "bad" else "gives NaN or infinity") in failed[index]
        else:
            np.testing.assert_array_equal(vectors[index], Words().embed([item])[0])


def test_one_bad_item_in_a_thousand_costs_a_few_calls() -> None:
    embedder = Words()
    failed = embed_checked(embedder, ["a"] * 700 + ["bad"] + ["a"] * 299, 3)[1]
    assert failed == {700: "ValueError: bad cannot be read"}
    assert embedder.calls <= 22


def test_a_batch_that_does_not_fit_into_memory_is_embedded_in_smaller_parts() -> None:
    sizes: list[int] = []

    def small(items: Sequence[Item]) -> Vectors:
        sizes.append(len(items))
        if len(items) > 5:
            raise MemoryError
        return np.ones((len(items), 2), np.float32)

    vectors, failed = embed_checked(Gives(small), ["a"] * 16, 2)
    assert failed == {}
    assert np.isfinite(vectors).all()
    assert sizes == [16, 8, 4, 4, 8, 4, 4]


@pytest.mark.parametrize("raised", [SystemExit(3), SystemExit("run download.sh")])
def test_an_embedder_that_would_end_the_process_fails_an_item_and_no_more(raised: SystemExit) -> None:
    def exits(items: Sequence[Item]) -> Vectors:
        if "bad" in items:
            raise raised
        return np.ones((len(items), 2), np.float32)

    failed = embed_checked(Gives(exits), ["a", "bad", "b"], 2)[1]
    assert failed == {1: f"SystemExit: {raised}"}


def test_an_item_that_spoils_its_batch_is_singled_out() -> None:
    def normalised_by_batch(items: Sequence[Item]) -> Vectors:
        values = np.array([[float(item), 1.0] for item in items])
        return (values / values.sum()).astype(np.float32)

    vectors, failed = embed_checked(Gives(normalised_by_batch), [1, 2, np.nan, 4], 2)
    assert set(failed) == {2}
    assert np.isfinite(vectors[[0, 1, 3]]).all()


def test_one_item_alone_is_tried_twice_and_compared_with_what_is_sure() -> None:
    away = iter([True])

    def embed(items: Sequence[Item]) -> Vectors:
        if next(away, False):
            raise ConnectionError("503 Service Unavailable")
        return Words().embed(items)

    assert embed_checked(Gives(embed), ["a"], 3, known_good=lambda: ["a"])[1] == {}

    def broken(items: Sequence[Item]) -> Vectors:
        raise ConnectionError("503 Service Unavailable")

    with pytest.raises(ModelError, match="fails for each of 1 item"):
        embed_checked(Gives(broken), ["a"], 3, known_good=lambda: ["a"])
    assert embed_checked(Gives(broken), ["a"], 3)[1] == {0: "ConnectionError: 503 Service Unavailable"}


@pytest.mark.parametrize("calls", [4, 15])  # to the first single item; to the last one
def test_an_embedder_that_is_away_for_a_moment_fails_no_good_item(calls: int) -> None:
    words = Words()

    def embed(items: Sequence[Item]) -> Vectors:
        if words.calls < calls:
            words.calls += 1
            raise ConnectionError("503 Service Unavailable")
        return words.embed(items)

    vectors, failed = embed_checked(Gives(embed), ["a"] * 7 + ["bad"], 3, known_good=lambda: ["a"])
    assert failed == {7: "ValueError: bad cannot be read"}
    assert vectors[:7, 0].tolist() == [1] * 7


def test_a_single_item_that_fails_is_that_items_fault() -> None:
    assert embed_checked(Words(), ["bad"], 3)[1] == {0: "ValueError: bad cannot be read"}
    assert embed_checked(Words(), [], 3)[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (lambda items: np.zeros((len(items), 2)), r"gives shape \(2, 2\) for 2 items and must give \(2, 3\); fix it"),
        (lambda items: np.zeros((1, 3)), r"gives shape \(1, 3\) for 2 items"),
        (lambda items: np.zeros(3), r"gives shape \(3,\)"),
        (lambda items: None, r"gives shape \(\)"),
        (lambda items: "vectors", r"gives a str instead of an array of numbers"),
        (lambda items: [[1.0], [1.0, 2.0]], r"gives a list instead of an array of numbers"),
    ],
)
def test_a_wrong_shape_is_the_models_fault(output: Callable[[Sequence[Item]], Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        embed_checked(Gives(output), ["a", "b"], 3)


@pytest.mark.parametrize(
    "output",
    [
        lambda items: [[1, 2, 3] for _ in items],
        lambda items: np.ones((len(items), 3), np.float16),
        lambda items: torch.ones(len(items), 3, dtype=torch.bfloat16, requires_grad=True),
    ],
)
def test_any_array_of_numbers_becomes_float32(output: Callable[[Sequence[Item]], Any]) -> None:
    vectors, failed = embed_checked(Gives(output), ["a", "b"], 3)
    assert (vectors.dtype, failed) == (np.float32, {})


def test_numbers_too_large_for_float32_fail_as_infinity() -> None:
    failed = embed_checked(Gives(lambda items: np.array([[1e300 if item == "b" else 1.0] for item in items])), ["a", "b"], 1)[1]
    assert failed == {1: "the embedder gives NaN or infinity for it"}


def test_a_query_that_cannot_be_embedded_is_an_error() -> None:
    embedder = CheckedEmbedder(Words(), dim=3)
    assert embedder.embed(["a"]).shape == (1, 3)
    with pytest.raises(ItemError, match=r"^The item cannot be embedded: ValueError: bad cannot be read$"):
        embedder.embed(["bad"])
    with pytest.raises(ItemError, match=r"^Item 1 of 2 cannot be embedded: the embedder gives NaN"):
        embedder.embed(["a", "nan"])
    with pytest.raises(ModelError, match="must give"):
        CheckedEmbedder(Words(), dim=4).embed(["a"])


# Which model it is


def test_weights_that_cannot_be_read_are_named() -> None:
    class Elsewhere(Words):
        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"weight": torch.empty(2, device="meta")}

    with pytest.raises(ModelError, match=r"The weights weight cannot be read: .*; load them as plain tensors"):
        fingerprint(Elsewhere())


def test_a_fingerprint_follows_the_weights() -> None:
    def of(module: torch.nn.Module) -> str | None:
        return fingerprint(TorchEmbedder(module, pixels, device="cpu"))

    first = of(small_net())
    assert first is not None
    assert len(first) == 64
    assert of(small_net()) == first
    assert of(small_net(seed=1)) != first
    assert of(small_net().to(torch.bfloat16)) not in (None, first)
    changed = small_net()
    changed.get_parameter("4.bias").data[0] += 1e-3
    assert of(changed) != first


def test_weights_are_found_where_they_usually_are() -> None:
    class Own:
        def __init__(self) -> None:
            self.model = small_net()

        def embed(self, items: Sequence[Item]) -> Vectors:
            return np.zeros((len(items), 4), np.float32)

    expected = fingerprint(TorchEmbedder(small_net(), pixels, device="cpu"))
    assert fingerprint(Own()) == expected
    assert fingerprint(CheckedEmbedder(Own(), dim=4)) == expected
    assert fingerprint(Words()) is None
    assert fingerprint(TorchEmbedder(torch.nn.Identity(), pixels, device="cpu")) is None


def test_probes_are_the_same_for_ever() -> None:
    images = KINDS["image"].probes()
    assert [(image.size, image.mode) for image in images] == [((224, 224), "RGB")] * 4
    digest = hashlib.sha256(b"".join(image.tobytes() for image in images)).hexdigest()
    assert digest == "fb2e0407673021fae45dabafd9c65a36093be807f653090b383c3f038bb14887"
    assert len(set(KINDS["text"].probes())) == 4


def test_probes_tell_one_model_from_another() -> None:
    def of(module: torch.nn.Module) -> Vectors:
        return probe_vectors(TorchEmbedder(module, pixels, device="cpu"), dim=4, kind="image")

    first = of(small_net())
    assert same_model(first, of(small_net()))
    assert same_model(first, first * np.float32(1 + 1e-4))
    assert not same_model(first, of(small_net(seed=1)))
    assert not same_model(first, first * 2)
    turned = np.roll(np.eye(4, dtype=np.float32), 1, axis=0) * np.array([[1], [-1], [1], [-1]], np.float32)  # every vector by 90°
    a_step_of_training = first + np.float32(0.05) * first @ turned  # a cosine distance of about 1e-3
    assert not same_model(first, a_step_of_training)
    assert not same_model(first, -first)
    assert not same_model(first, first[:, :3])


def test_the_kind_of_probe_is_found_by_trying() -> None:
    images = TorchEmbedder(small_net(), pixels, device="cpu")
    kind, found, _ = probe(images, kind=None)
    assert kind == "image"
    assert found is not None
    np.testing.assert_array_equal(found, probe_vectors(images, dim=4, kind="image"))
    assert probe(Words(), kind=None)[0] == "text"
    features = TorchEmbedder(torch.nn.Linear(2, 2), torch.as_tensor, device="cpu")
    assert probe(features, kind=None)[:2] == (None, None)


def test_an_embedder_that_fails_on_its_own_kind_is_broken() -> None:
    images = TorchEmbedder(small_net(), pixels, device="cpu")
    with pytest.raises(ModelError, match="fails for each of 4 items"):
        probe_vectors(images, dim=4, kind="text")

    def only_short(items: Sequence[Item]) -> Vectors:
        if any(len(item) > 20 for item in items):
            raise ValueError("too long")
        return np.ones((len(items), 2), np.float32)

    with pytest.raises(ModelError, match="fails for 3 of 4 text probes: ValueError: too long; fix the embedder"):
        probe_vectors(Gives(only_short), dim=2, kind="text")


class Scores:
    def __init__(self, found):
        self.found = found

    def scores(self, vectors):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    ("found", "saying"),
    [
        (np.full((3, 4), 0.25), "gives shape (3, 4) for 2 vectors"),
        (np.full(2, 0.25), "gives shape (2,) for 2 vectors"),
        (np.array([[0.5, 0.5], [np.nan, 0.5]]), "gives nan, and probabilities lie between 0 and 1"),
        (np.array([[0.5, 0.5], [50.0, 0.5]]), "gives 50, and probabilities lie between 0 and 1; end it with a softmax"),
        (KeyError("class"), "fails for 2 vectors: KeyError"),
        ("none", "instead of an array of numbers"),
    ],
)
def test_a_classifier_gives_a_probability_of_each_class(found, saying):
    with pytest.raises(ModelError, match=re.escape(saying)):
        scored(Scores(found), np.zeros((2, 3), np.float32))


def test_rounding_does_not_make_a_classifier_a_bad_one():
    found = np.array([[1.00001, -1e-6], [0.5, 0.5]])
    np.testing.assert_allclose(scored(Scores(found), np.zeros((2, 3), np.float32)), found, rtol=1e-6)
