"""Embedders: any torch module with its preprocessing, or any object with `embed`; and what shows that one is sound.

torch is imported only by what runs a torch module.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import json
import secrets
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rmvdb.canonical import unrankable
from rmvdb.errors import ItemError, ModelError
from rmvdb.items.objects import Allowed, load_object
from rmvdb.protocols import Classifier, Embedder
from rmvdb.text import counted
from rmvdb.types import Item, Metric, Vectors

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

#: What a model version's items are.
Kind: TypeAlias = Literal["image", "text"]
_PROBE_TEXTS = (
    "a photo of a red bicycle in front of a white wall",
    "Two dogs run along the beach at sunset.",
    "42",
    "The quick brown fox jumps over the lazy dog, and nobody minds.",
)
#: What a changed preprocessing of texts shows on: accents and other scripts, white space, capitals, and where a text is cut.
_MORE_TEXTS = (
    "  Straße, naïve café, piñata;\t東京タワー and Москва\n🚲  ",
    "ALL CAPITALS, mIxEd CaSe, don't-split_me: https://example.org/a?b=1&c=2",
    " ".join(f"Sentence {n} tells of a {n % 7}-day walk from hill {n} to river {n * 13 % 101}." for n in range(99)),
)
#: How many probes an embedder must take; they are embedded in one batch.
REQUIRED = len(_PROBE_TEXTS)
#: Width and height of pictures that a preprocessing must crop, shrink or enlarge.
_MORE_SIZES = ((512, 341), (160, 360), (48, 48))
#: The largest cosine distance between two computations of one vector by one model: on other devices, in other batches, on another
#: day. Devices and batch sizes differ by about 1e-6 in float32, a step of training by 1e-3, another preprocessing by 1e-4.
TOLERANCE = 1e-5


@dataclass
class PixelLimit:
    """The pixels of the largest picture that is decoded in this process: a small file may hold a picture of hundreds of MiB."""

    most: int = 50_000_000


pixel_limit = PixelLimit()
#: Bytes of an item's digest.
DIGEST = 16
#: How far a probability may lie outside 0 and 1 by rounding.
TOLERATED = 1e-3


def load(spec: str, options: Mapping[str, Any] | None = None, *, allowed: Allowed | None = None) -> Embedder:
    """The embedder that `package.module:object` names: an object with `embed`, or a class or function that makes one.

    `options` are given to the class or function by name. Raises ModelError where that fails, UsageError for
    a malformed spec, ConfigError for a module that is not `allowed`.
    """
    found = load_object(spec, error=ModelError, allowed=allowed)
    made: Any = found if _is_ready(found) else _make(spec, found, dict(options or {}))
    if _is_ready(found) and options:
        raise ModelError(f"{spec!r} is an object that is ready and takes no options; remove {', '.join(options)}")
    if not callable(getattr(made, "embed", None)):
        raise ModelError(f"{spec!r} gives a {type(made).__name__} without embed(items); {_way_to_embed(made)}")
    embedder: Embedder = made
    return embedder


def load_classifier(spec: str, *, allowed: Allowed | None = None) -> Classifier:
    """The classifier that `package.module:object` names: an object with `scores`, or a class or function that makes one.

    Raises ModelError where that fails, UsageError for
    a malformed spec, ConfigError for a module that is not `allowed`.
    """
    found = load_object(spec, error=ModelError, allowed=allowed)
    made: Any = found if hasattr(found, "scores") and not inspect.isclass(found) else _make(spec, found, {})
    if not hasattr(made, "scores"):
        raise ModelError(f"{spec!r} has no scores(vectors); give it one that returns (n, classes) probabilities")
    classifier: Classifier = made
    return classifier


def scored(classifier: Classifier, vectors: Vectors) -> Vectors:
    """The classifier's probabilities (n, classes) for vectors (n, dim); ModelError where it gives anything else."""
    try:
        found = _as_array(classifier.scores(vectors))
    except ModelError:
        raise
    except Exception as exc:
        raise ModelError(f"The classifier fails for {counted(len(vectors), 'vector')}: {_reason(exc)}; mend it") from exc
    if found.ndim != 2 or len(found) != len(vectors) or not found.shape[1]:
        raise ModelError(
            f"The classifier gives shape {found.shape} for {counted(len(vectors), 'vector')}; "
            "let it give (n, classes) probabilities"
        )
    if not np.all((found >= -TOLERATED) & (found <= 1 + TOLERATED)):  # NaN is neither
        worst = float(found.flat[int(np.argmax(np.where(np.isfinite(found), np.abs(found - 0.5), np.inf)))])
        raise ModelError(f"The classifier gives {worst:g}, and probabilities lie between 0 and 1; end it with a softmax")
    return found


def _is_ready(found: object) -> bool:
    return not inspect.isclass(found) and (hasattr(found, "embed") or not callable(found) or hasattr(found, "state_dict"))


def _make(spec: str, factory: Any, options: dict[str, Any]) -> object:
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as exc:
        raise ModelError(f"{spec!r} cannot be made with options {list(options)}: {exc}; mend the options") from exc
    except ValueError:
        pass  # a few classes written in C have no signature; the call itself will tell
    try:
        made: object = factory(**options)
    except Exception as exc:
        raise ModelError(f"{spec!r} fails to load: {_reason(exc)}; mend it and try again") from exc
    return made


def _way_to_embed(made: object) -> str:
    if hasattr(made, "state_dict"):
        return "wrap it: TorchEmbedder(module, preprocess)"
    return "give it a method embed(items) that returns (n, dim) float32"


def read_image(item: Item, *, mode: str = "RGB") -> Image:
    """The picture of a path, bytes, an array (height, width) or (height, width, channels) of uint8, or a PIL image.

    Raises ItemError where it cannot be read, and before anything is decoded for one of more pixels than `[items] max_pixels`.
    """
    from PIL import Image

    try:
        if isinstance(item, Image.Image):
            return _decodable(item).convert(mode)
        if isinstance(item, np.ndarray):
            return Image.fromarray(item).convert(mode)
        file = io.BytesIO(item) if isinstance(item, (bytes, bytearray, memoryview)) else item
        if isinstance(file, str | Path) and not stat.S_ISREG(Path(file).stat().st_mode):
            raise ItemError("it is no regular file")  # a pipe would be waited for
        with Image.open(file, formats=_formats()) as image:
            return _decodable(image).convert(mode)
    # A broken picture raises nearly anything: OSError, SyntaxError, struct.error, DecompressionBombError …
    except Exception as exc:
        raise ItemError(f"{_named(item)} is no picture that can be read: {_reason(exc)}") from exc


@functools.cache
def _formats() -> list[str]:
    """The formats that are read: not PostScript, a program that another program would run, nor ICO, which opening decodes."""
    from PIL import Image

    Image.init()
    return [name for name in Image.OPEN if name not in ("EPS", "ICO")]


def _decodable(image: Image) -> Image:
    """The picture, of which only the header may have been read so far; ItemError if it is too large."""
    if (pixels := image.width * image.height) > pixel_limit.most:
        raise ItemError(
            f"it has {image.width} × {image.height} = {pixels:,} pixels, and items.max_pixels is {pixel_limit.most:,}; make it "
            "smaller, or raise that setting"
        )
    return image


def read_item(item: Item) -> Item:
    """Pictures as PIL images; texts and everything else as they are. A text is never taken for a path; a Path is one."""
    if isinstance(item, (Path, bytes, bytearray, memoryview)):
        return read_image(item)
    if isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim in (2, 3):
        return read_image(item)
    if type(item).__module__.startswith("PIL."):
        return read_image(item)
    return item


def _named(item: Item) -> str:
    return str(item) if isinstance(item, (str, Path)) else f"An item of type {type(item).__name__}"


def item_digest(item: Item) -> bytes | None:
    """What tells an item from another one: of a file its name, size and time, else what it holds. None where nobody knows."""
    try:
        return hashlib.blake2b(_told(item), digest_size=DIGEST).digest()
    except Exception:  # noqa: BLE001 (a broken picture raises nearly anything once it is read; whoever embeds it will tell)
        return None


def _told(item: Any) -> bytes:
    from PIL import Image  # here, so that commands that embed nothing do not wait for it

    if isinstance(item, Path):
        file = item.stat()
        return f"{item} {file.st_size} {file.st_mtime_ns}".encode()
    if isinstance(item, bytes | bytearray):
        return b"bytes " + item
    if isinstance(item, np.ndarray) and item.dtype != np.dtype(object):
        return f"{item.dtype} {item.shape} ".encode() + item.tobytes()
    if isinstance(item, Image.Image):
        _decodable(item)
        return f"{item.mode} {item.size} {item.getpalette()} ".encode() + item.tobytes()

    def part(one: Any) -> str:
        if not isinstance(one, Path | bytes | bytearray | np.ndarray | Image.Image):
            raise TypeError(type(one).__name__)  # nobody knows what it holds
        return hashlib.blake2b(_told(one), digest_size=DIGEST).hexdigest()

    return json.dumps(item, sort_keys=True, default=part).encode()


class TorchEmbedder:
    """A torch module with its preprocessing, in batches, without gradients, in evaluation mode, float32 out.

    Many threads may use one: they prepare items at the same time and run the module in turn.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        preprocess: Callable[[Any], Any],
        *,
        dim: int | None = None,
        device: str = "auto",
        batch_size: int = 64,
        read: Callable[[Item], Any] = read_item,
    ) -> None:
        """`preprocess` makes a tensor (or an array) of what `read` gives: a PIL image in RGB, a text, or the item itself.

        The module is moved to `device` ("auto": CUDA, Apple's GPU or the CPU). Where `dim` is given, another dimension
        raises ModelError.
        """
        self.device = _device(device)
        self.module = module.to(self.device).eval()
        self.dim = dim
        self.batch_size = batch_size
        self._preprocess = preprocess
        self._read = read
        self._lock = threading.Lock()

    def embed(self, items: Sequence[Item]) -> Vectors:
        """Vectors (n, dim) for n items, in order; raises what reading and preprocessing raise."""
        starts = range(0, len(items), self.batch_size)
        parts = [self._embed_batch(items[start : start + self.batch_size]) for start in starts]
        return np.concatenate(parts) if parts else np.empty((0, self.dim or 0), np.float32)

    def _embed_batch(self, items: Sequence[Item]) -> Vectors:
        import torch

        batch = torch.stack([torch.as_tensor(self._preprocess(self._read(item))) for item in items])  # (n, …)
        with self._lock, torch.inference_mode():
            output = self.module(batch.to(self.device))  # (n, dim)
        vectors = _as_array(output)
        if vectors.ndim != 2 or (self.dim is not None and vectors.shape[1] != self.dim):
            raise _wrong_shape(vectors, len(items), self.dim)
        return vectors


def _device(name: str) -> torch.device:
    import torch

    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


class CheckedEmbedder:
    """An embedder whose vectors are (n, dim) and finite, or it raises."""

    def __init__(self, embedder: Embedder, *, dim: int, confirm: bool = False) -> None:
        self.embedder = embedder
        self.dim, self.confirm = dim, confirm

    def embed(self, items: Sequence[Item]) -> Vectors:
        """Vectors (n, dim); raises ItemError for the first item that cannot be embedded, ModelError for a broken model."""
        vectors, failed = embed_checked(self.embedder, items, self.dim, confirm=self.confirm)
        if failed:
            index, reason = min(failed.items())
            which = "The item" if len(items) == 1 else f"Item {index} of {len(items)}"
            raise ItemError(f"{which} cannot be embedded: {reason}")
        return vectors


def checked(embedder: Embedder, *, dim: int, confirm: bool = False) -> CheckedEmbedder:
    """The embedder with its output checked, for queries and writes; `confirm` as in `embed_checked`."""
    return CheckedEmbedder(embedder, dim=dim, confirm=confirm)


#: How many others are tried, where every item of several fails, before a model or a source counts as broken.
KNOWN_GOOD = 10


def embed_checked(
    embedder: Embedder,
    items: Sequence[Item],
    dim: int,
    *,
    metric: Metric | None = None,
    known_good: Callable[[], Sequence[Item]] = tuple,
    confirm: bool = False,
) -> tuple[Vectors, dict[int, str]]:
    """Vectors (n, dim) and, by index, why an item has none; its row is NaN, so that it cannot pass for a vector.

    A batch that fails is halved until the items that cannot be read, or give NaN or what `metric` cannot rank, stand alone, and
    these are tried once more.
    Raises ModelError if every item fails, and those that could be embedded before (`known_good` gives some, or none) do, too; and
    wherever the shape is wrong: then the model is broken, not an item. With `confirm`, for vectors that are kept, one item is
    embedded once more, alone: ModelError if its row is another one.
    """
    vectors = np.full((len(items), dim), np.nan, np.float32)
    failed: dict[int, str] = {}
    waiting = [list(range(len(items)))] if items else []
    while waiting:
        part = waiting.pop()
        reason = _try(embedder, items, part, vectors, metric)
        if reason and len(part) == 1:
            failed[part[0]] = reason
        elif reason:
            # Rows that came out well are kept: only the others are tried again, the first half first.
            rest = [index for index in part if not np.isfinite(vectors[index]).all()]
            waiting += [half for half in (rest[len(rest) // 2 :], rest[: len(rest) // 2]) if half]
    others = known_good() if failed and len(failed) == len(items) else ()
    several = len(items) > 1 or bool(others)  # of one item alone, with nothing to compare it with, nobody can tell
    if several and failed and len(failed) == len(items) and not any(_works(embedder, item, dim, metric) for item in others):
        raise ModelError(
            f"The embedder fails for each of {counted(len(items), 'item')}: {failed[0]}; mend the embedder or its items"
        )
    if several:  # an embedder behind a network may have been away for a moment
        failed = {index: reason for index in failed if (reason := _try(embedder, items, [index], vectors, metric))}
    good = [index for index in range(len(items)) if index not in failed]
    if confirm and len(good) > 1:
        _confirm(embedder, items, vectors, [secrets.choice(good)], TOLERANCE)  # any: a sorted batch leaves some where they were
    return vectors, dict(sorted(failed.items()))


def _confirm(embedder: Embedder, items: Sequence[Item], vectors: Vectors, indices: Sequence[int], tolerance: float) -> None:
    """ModelError if one of these items, embedded alone, has another vector than its row among all of them."""
    for index in indices:
        alone = np.empty((1, vectors.shape[1]), np.float32)
        if _try(embedder, [items[index]], [0], alone, None):
            continue  # it is away for a moment, which tells nothing of the row
        if (far := _distances(vectors[index : index + 1], alone)[0]) > tolerance:
            raise ModelError(
                f"The embedder gives another vector for item {index} of {len(items)} than for the same item alone: the distance "
                f"is {far:.1e}, and {tolerance:.0e} is allowed; let it return one row for each item in the order of the items, "
                "in evaluation mode and in float32"
            )


def _works(embedder: Embedder, item: Item, dim: int, metric: Metric | None) -> bool:
    return not _try(embedder, [item], [0], np.empty((1, dim), np.float32), metric)


def _try(embedder: Embedder, items: Sequence[Item], part: list[int], vectors: Vectors, metric: Metric | None) -> str:
    """Embed these items into their rows; returns why that failed, empty where it did not."""
    try:
        output = embedder.embed([items[index] for index in part])
    except ModelError:
        raise
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - it is foreign code: whatever it raises is the reason
        return _reason(exc)
    found = _as_array(output)
    if found.shape != (len(part), vectors.shape[1]):
        raise _wrong_shape(found, len(part), vectors.shape[1])
    good = np.asarray(np.isfinite(found).all(axis=1))
    if not good.all():
        vectors[np.array(part)[good]] = found[good]
        return "the embedder gives NaN or infinity for it"
    odd = unrankable(found, metric) if metric else {}
    good[list(odd)] = False
    vectors[np.array(part)[good]] = found[good]
    return f"its vector {next(iter(odd.values()))}" if odd else ""


def _as_array(output: Any) -> Vectors:
    """The embedder's output as float32, also where it is a tensor on some device."""
    if hasattr(output, "detach"):
        output = output.detach().float().cpu().numpy()
    try:
        with np.errstate(over="ignore"):  # what is too large becomes infinity, which the caller looks for
            return np.asarray(output, dtype=np.float32)
    except (TypeError, ValueError) as exc:
        raise ModelError(f"The embedder gives a {type(output).__name__} and no array of numbers: {exc}") from exc


def _wrong_shape(found: npt.NDArray[Any], n: int, dim: int | None) -> ModelError:
    expected = f"({n}, {'dim' if dim is None else dim})"
    return ModelError(
        f"The embedder gives shape {found.shape} for {n} items and must give {expected}; mend it or the version's dim"
    )


def _reason(exc: BaseException) -> str:
    return str(exc) if isinstance(exc, ItemError) else f"{type(exc).__name__}: {exc}".removesuffix(": ")


def fingerprint(embedder: Embedder) -> str | None:
    """The SHA-256 over the weights' names, types, shapes and bytes; None for an embedder that shows none.

    Weights are looked for in `state_dict()` of the embedder, of its `module` or `model`, or of the embedder that it wraps.
    """
    weights = {name: value for name, value in _state(embedder).items() if hasattr(value, "shape")}
    if not weights:
        return None
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        kind = str(value.dtype).removeprefix("torch.")
        digest.update(f"{name} {kind} {tuple(value.shape)}\n".encode())
        try:
            digest.update(_raw_bytes(value))
        except (RuntimeError, TypeError) as exc:  # they are not in memory, or in no plain layout
            raise ModelError(f"The weights {name} cannot be read: {exc}; load them as plain tensors") from exc
    return digest.hexdigest()


def _state(embedder: object) -> Mapping[str, Any]:
    for owner in (embedder, getattr(embedder, "module", None), getattr(embedder, "model", None)):
        state_dict = getattr(owner, "state_dict", None)
        if callable(state_dict):
            state: Mapping[str, Any] = state_dict()
            return state
    inner = getattr(embedder, "embedder", None)
    return _state(inner) if inner is not None else {}


def _raw_bytes(value: Any) -> bytes:
    if not hasattr(value, "detach"):
        return np.asarray(value).tobytes()
    import torch

    # As bytes, because numpy has no bfloat16.
    raw: bytes = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


def probes(kind: Kind) -> list[Item]:
    """The fixed items on which two embedders are compared: the same on every machine and in every version of rmvdb."""
    if kind == "text":
        return list(_PROBE_TEXTS)
    from PIL import Image

    down, across = np.mgrid[0:224, 0:224].astype(np.uint32)
    pictures = (
        (down, across, (down + across) // 2),
        (255 * (down // 28 % 2 ^ across // 28 % 2), 255 * (across // 56 % 2), down),
        ((down - 112) ** 2 + (across - 112) ** 2 >> 6, 255 - across, 255 - down),
        # Noise from arithmetic, because generators of random numbers change from release to release.
        tuple((down * 224 + across + 1) * factor >> 13 for factor in (2654435761, 2246822519, 3266489917)),
    )
    return [Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8)) for channels in pictures]


def more_probes(kind: Kind) -> list[Item]:
    """Further fixed items, on which a changed preprocessing shows; an embedder need not take them."""
    if kind == "text":
        return list(_MORE_TEXTS)
    return [_picture(width, height) for width, height in _MORE_SIZES]


def _picture(width: int, height: int) -> Image:
    """A picture with slow changes, edges and fine detail, all of it from arithmetic."""
    from PIL import Image

    down, across = np.mgrid[0:height, 0:width].astype(np.uint32)
    channels = (
        255 * across // width,
        255 * (down // 3 % 2 ^ across // 5 % 2),
        (down * width + across + 1) * 2654435761 >> 13,
    )
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def probe_vectors(embedder: Embedder, *, dim: int, kind: Kind) -> Vectors:
    """What the embedder gives for the probes of a kind, (probes, dim); a row is NaN if it doesn't take one of the further probes.

    Raises ModelError where it fails for one of the four that it must take.
    """
    vectors, failed = embed_checked(embedder, probes(kind), dim)
    if failed:
        raise ModelError(
            f"The embedder fails for {len(failed)} of {REQUIRED} {kind} probes: {next(iter(failed.values()))}; mend it"
        )
    return np.concatenate([vectors, *(_embed_alone(embedder, item, dim) for item in more_probes(kind))])


def _embed_alone(embedder: Embedder, item: Item, dim: int) -> Vectors:
    """The vector (1, dim) of one item, embedded alone since it may not fit into a batch with others; NaN if there is none."""
    for _ in range(2):  # it may be away for a moment
        try:
            vectors, failed = embed_checked(embedder, [item], dim)
        except ModelError:
            break
        if not failed:
            return vectors
    return np.full((1, dim), np.nan, np.float32)


def check_steady(embedder: Embedder, found: Vectors, *, kind: Kind) -> None:
    """ModelError for an embedder whose vector of an item depends on the batch or on chance; `found` are its probe vectors."""
    # Half of what is allowed later: a gallery has more items than there are probes, and one of them would be the worst.
    _confirm(embedder, probes(kind), found[:REQUIRED], range(REQUIRED), TOLERANCE / 2)


def same_model(old: Vectors, new: Vectors, *, tolerance: float = TOLERANCE) -> bool:
    """Whether two sets of probe vectors (n, dim) come from one model, on whatever device.

    Each pair may differ by `tolerance` in cosine distance and by its square root in length. Of an older version of rmvdb there
    are fewer probes, and a row of NaN is of a probe that the embedder didn't take.
    """
    known = np.isfinite(old).all(axis=1)  # (n,)
    if old.shape[1:] != new.shape[1:] or len(old) > len(new):
        return False
    return bool((_distances(old[known], new[: len(old)][known]) <= tolerance).all())


def _distances(one: Vectors, other: Vectors) -> npt.NDArray[np.float64]:
    """How far rows lie apart, (n,): 1 − cos + (|a| − |b|)² / (2 |a| |b|), both differences in one number."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    gap = ((a - b) ** 2).sum(axis=1)  # |a − b|² = 2 |a| |b| (1 − cos) + (|a| − |b|)²
    scale = 2 * np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    far: npt.NDArray[np.float64] = np.where(gap == 0, 0.0, np.divide(gap, scale, out=np.full_like(gap, np.inf), where=scale > 0))
    return np.where(np.isnan(far), np.inf, far)
