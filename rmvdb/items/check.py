"""Checking what embedders and classifiers return: foreign code, which may fail for one item, for all of them, or silently."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rmvdb.canonical.vectors import unrankable
from rmvdb.errors import ItemError, ModelError
from rmvdb.protocols import Classifier, Embedder
from rmvdb.text import counted
from rmvdb.types import Item, Metric, Vectors

#: The largest cosine distance between two computations of one vector by one model: on other devices, in other batches, on another
#: day. Devices and batch sizes differ by about 1e-6 in float32, a step of training by 1e-3, another preprocessing by 1e-4.
TOLERANCE = 1e-5
#: If every item of several fails, this many known good ones are tried before the model or the source counts as broken.
KNOWN_GOOD = 10
#: If so many single items fail and none is good yet, known good ones are tried at once.
SINGLE_FAILURES = 10
#: How far rounding may put a probability outside 0 and 1.
ROUNDING = 1e-3


class CheckedEmbedder:
    """An embedder for queries and writes. Its vectors are (n, dim) and finite, or it raises. `confirm` as in `embed_checked`."""

    def __init__(self, embedder: Embedder, *, dim: int, confirm: bool = False) -> None:
        self.embedder = embedder
        self.dim, self.confirm = dim, confirm

    def embed(self, items: Sequence[Item]) -> Vectors:
        """Return vectors (n, dim). Raise ItemError for the first item that cannot be embedded, ModelError for a broken model."""
        vectors, failed = embed_checked(self.embedder, items, self.dim, confirm=self.confirm)
        if failed:
            index, reason = min(failed.items())
            which = "The item" if len(items) == 1 else f"Item {index} of {len(items)}"
            raise ItemError(f"{which} cannot be embedded: {reason}", at=index, reason=reason)
        return vectors


def embed_checked(
    embedder: Embedder,
    items: Sequence[Item],
    dim: int,
    *,
    metric: Metric | None = None,
    known_good: Callable[[], Sequence[Item]] = tuple,
    confirm: bool = False,
) -> tuple[Vectors, dict[int, str]]:
    """Return vectors (n, dim) and, by index, why an item has none. Its row is NaN, so that it cannot pass for a vector.

    An item fails if it cannot be read, or if its vector is not finite, has another shape than those of other items, or cannot be
    ranked by `metric`. A failed item is tried twice. With `confirm`, for vectors that are kept, one item is embedded once more,
    alone.

    Raises: ModelError if the model is broken, not an item: the shape is wrong, a confirmed row differs, or every item fails and
    so does every item of `known_good`, which returns items that could be embedded before.
    """
    works = functools.cache(lambda: _works(embedder, known_good(), dim, metric))
    vectors, failed = _embed_in_halves(embedder, items, dim, metric, works)
    if len(items) > 1 or (failed and works()):  # one item alone cannot be compared with anything
        failed = _try_again(embedder, items, vectors, failed, metric)
    good = [index for index in range(len(items)) if index not in failed]
    if confirm and len(good) > 1:
        # Any of them: a model that sorts its batch leaves some rows in their places.
        confirm_rows(embedder, items, vectors, [secrets.choice(good)], TOLERANCE)
    return vectors, dict(sorted(failed.items()))


def _embed_in_halves(
    embedder: Embedder, items: Sequence[Item], dim: int, metric: Metric | None, works: Callable[[], bool | None]
) -> tuple[Vectors, dict[int, str]]:
    """Embed items, and halve a batch that fails until the items that fail stand alone. Return vectors, and reasons by index.

    Raises: ModelError if every item fails and the model does not work for others either.
    """
    vectors = np.full((len(items), dim), np.nan, np.float32)
    failed: dict[int, str] = {}
    waiting = [list(range(len(items)))] if items else []
    broken: ModelError | None = None
    while waiting:
        part = waiting.pop()
        try:
            reason = _embed_into(vectors, embedder, items, part, metric)
        except ModelError as exc:
            if len(part) == len(items) and not works():
                raise
            broken, reason = exc, str(exc)  # others tell whether it is the model
        if reason and len(part) == 1:
            failed[part[0]] = reason
            # Such a model may take a minute for each item before it fails.
            if len(failed) == SINGLE_FAILURES and not np.isfinite(vectors).any() and works() is False:
                raise _fails_for_each(failed)
        elif reason:
            # Good rows are kept: only the others are tried again, the first half first.
            rest = [index for index in part if not np.isfinite(vectors[index]).all()]
            waiting += [half for half in (rest[len(rest) // 2 :], rest[: len(rest) // 2]) if half]
    hopeless = bool(failed) and len(failed) == len(items) and not works()
    if hopeless and (broken or len(items) > 1 or works() is False):
        raise broken or _fails_for_each(failed)
    return vectors, failed


def _works(embedder: Embedder, items: Sequence[Item], dim: int, metric: Metric | None) -> bool | None:
    """Whether the model can embed one of these items, which it could before. None if there are none."""
    for item in items:
        try:
            if not _embed_into(np.empty((1, dim), np.float32), embedder, [item], [0], metric):
                return True
        except ModelError:
            continue
    return False if items else None


def _fails_for_each(failed: Mapping[int, str]) -> ModelError:
    reason = failed[min(failed)]
    return ModelError(f"The embedder fails for each of {counted(len(failed), 'item')}: {reason}; fix the embedder or its items")


def _try_again(
    embedder: Embedder, items: Sequence[Item], vectors: Vectors, failed: dict[int, str], metric: Metric | None
) -> dict[int, str]:
    """Embed each failed item once more: an embedder behind a network may have been away for a moment. Return what still fails."""
    reasons = {}
    for index in failed:
        try:
            reasons[index] = _embed_into(vectors, embedder, items, [index], metric)
        except ModelError as exc:  # the others are good
            reasons[index] = str(exc)
    return {index: reason for index, reason in reasons.items() if reason}


def confirm_rows(embedder: Embedder, items: Sequence[Item], vectors: Vectors, rows: Sequence[int], tolerance: float) -> None:
    """Raise ModelError if one of these items, embedded alone, has another vector than its row among all of them."""
    for index in rows:
        alone = np.empty((1, vectors.shape[1]), np.float32)
        if _embed_into(alone, embedder, [items[index]], [0], None):
            continue  # the embedder may be away for a moment, so the row may be correct
        if (far := distances(vectors[index : index + 1], alone)[0]) > tolerance:
            raise ModelError(
                f"The embedder gives another vector for item {index} of {len(items)} than for the same item alone: the distance "
                f"is {far:.1e}, and {tolerance:.0e} is allowed; let it return one row for each item in the order of the items, "
                "in evaluation mode and in float32"
            )


def _embed_into(vectors: Vectors, embedder: Embedder, items: Sequence[Item], part: list[int], metric: Metric | None) -> str:
    """Embed these items into their rows of `vectors`. Return why that failed; empty if it did not."""
    try:
        output = embedder.embed([items[index] for index in part])
    except ModelError:
        raise
    except (Exception, SystemExit) as exc:  # noqa: BLE001 (foreign code: whatever it raises is the reason)
        return reason_of(exc)
    made, reason = _rows(output, len(part), vectors.shape[1])
    good = np.asarray(np.isfinite(made).all(axis=1))
    if not good.all():
        reason = reason or "the embedder gives NaN or infinity for it"
    odd = {at: why for at, why in unrankable(made, metric).items() if good[at]} if metric else {}
    good[list(odd)] = False
    vectors[np.array(part)[good]] = made[good]
    return reason or (f"its vector {next(iter(odd.values()))}" if odd else "")


def _rows(output: Any, n: int, dim: int) -> tuple[Vectors, str]:
    """Return an output as (n, dim). If some rows of a list have another shape, those are NaN, and the reason is returned, too.

    Raises: ModelError if no row has the shape.
    """
    try:
        made = as_array(output)
        if made.shape != (n, dim):
            raise wrong_shape(made, n, dim)
    except ModelError:
        if not isinstance(output, list | tuple) or len(output) != n:
            raise
        made, reason = np.full((n, dim), np.nan, np.float32), ""
        for at, row in enumerate(output):
            try:
                one = as_array(row)
            except ModelError:
                one = np.empty(0, np.float32)
            if one.shape == (dim,):
                made[at] = one
            else:
                reason = f"the embedder gives shape {one.shape} for it and must give ({dim},)"
        if np.isnan(made).all():
            raise
        return made, reason
    return made, ""


def scored(classifier: Classifier, vectors: Vectors) -> Vectors:
    """Return the classifier's probabilities (n, classes) of vectors (n, dim). Raise ModelError if it returns anything else."""
    try:
        scores = as_array(classifier.scores(vectors))
    except ModelError:
        raise
    except Exception as exc:
        raise ModelError(
            f"The classifier fails for {counted(len(vectors), 'vector')}: {reason_of(exc)}; fix the classifier"
        ) from exc
    if scores.ndim != 2 or len(scores) != len(vectors) or not scores.shape[1]:
        raise ModelError(
            f"The classifier gives shape {scores.shape} for {counted(len(vectors), 'vector')}; "
            "let it give (n, classes) probabilities"
        )
    if not np.all((scores >= -ROUNDING) & (scores <= 1 + ROUNDING)):  # NaN is neither
        worst = float(scores.flat[int(np.argmax(np.where(np.isfinite(scores), np.abs(scores - 0.5), np.inf)))])
        raise ModelError(f"The classifier gives {worst:g}, and probabilities lie between 0 and 1; end it with a softmax")
    return scores


def distances(one: Vectors, other: Vectors) -> npt.NDArray[np.float64]:
    """Return how far rows lie apart, (n,): 1 − cos + (|a| − |b|)² / (2 |a| |b|), both differences in one number."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    gap = ((a - b) ** 2).sum(axis=1)  # |a − b|² = 2 |a| |b| (1 − cos) + (|a| − |b|)²
    scale = 2 * np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    far: npt.NDArray[np.float64] = np.where(gap == 0, 0.0, np.divide(gap, scale, out=np.full_like(gap, np.inf), where=scale > 0))
    return np.where(np.isnan(far), np.inf, far)


def as_array(output: Any) -> Vectors:
    """Return a model's output as float32, also if it is a tensor on some device. Raise ModelError if it is not numbers."""
    try:
        if hasattr(output, "detach"):
            output = output.detach().float().cpu().numpy()
        with np.errstate(over="ignore"):  # a number that is too large becomes infinity, which the caller looks for
            return np.asarray(output, dtype=np.float32)
    except (TypeError, ValueError, RuntimeError) as exc:  # RuntimeError: a list of tensors that need gradients
        raise ModelError(
            f"The embedder gives a {type(output).__name__} instead of an array of numbers ({exc}); "
            "correct its embed, so that each item gives one row"
        ) from exc


def wrong_shape(made: npt.NDArray[Any], n: int, dim: int | None) -> ModelError:
    """Return the error for an embedder's output of another shape than (n, dim)."""
    expected = f"({n}, {'dim' if dim is None else dim})"
    return ModelError(
        f"The embedder gives shape {made.shape} for {n} items and must give {expected}; fix it or correct the version's dim"
    )


def reason_of(exc: BaseException) -> str:
    """Return what an error of foreign code says, with its type."""
    return str(exc) if isinstance(exc, ItemError) else f"{type(exc).__name__}: {exc}".removesuffix(": ")
