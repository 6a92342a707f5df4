"""The three parts of a sample: to train on, to calibrate and choose on, and to measure on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rmvdb.learning.method import Pairs
from rmvdb.planning.quality import Bools

#: More records make a narrower interval, but the cost grows with their square.
MOST_HELD_OUT = 3000
#: A class of fewer records is held out whole, if that leaves two or more such classes in each held-out part.
SMALL_CLASS = 20
#: The tenths that are held out to calibrate on and to measure on, in the order in which they are taken.
TENTHS = ((3, 8, 6, 1, 9), (0, 5, 2, 7, 4))

#: Rows to train on, to calibrate on and to measure on.
Split = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.intp]]


def split(pairs: Pairs, *, seed: int, most: int | None = None, seen: Bools | None = None) -> Split:
    """Split the rows: about 60 % to train on, and 20 %, or `most`, each to calibrate and to measure on.

    The parts are disjoint, and together they are all rows. Rows that an earlier training has `seen` (n,) are trained on.
    """
    if seen is not None and seen.any():
        fresh = np.flatnonzero(~seen)
        share = min(5, max(2, round(2 * len(pairs) / max(len(fresh), 1))))  # tenths of the fresh rows
        check, judge = (fresh[rows] for rows in _held_out(pairs.take(fresh), share, seed=seed, most=most))
    else:
        check, judge = _held_out(pairs, 2, seed=seed, most=most)
    return np.setdiff1d(np.arange(len(pairs)), np.concatenate([check, judge])), check, judge


def _held_out(pairs: Pairs, share: int, *, seed: int, most: int | None) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return `share` tenths of the rows, or `most`, to calibrate on, and as many to measure on."""
    most = MOST_HELD_OUT if most is None else most
    rng = np.random.default_rng(seed)
    rows, turn = rng.permutation(len(pairs)), np.arange(len(pairs))
    if pairs.labels is not None:
        codes = np.unique(pairs.labels, return_inverse=True)[1].reshape(-1)
        codes = rng.permutation(codes.max() + 1)[codes]
        rows = rows[np.argsort(codes[rows], kind="stable")]
        sizes = np.bincount(codes)
        small = np.flatnonzero(sizes < SMALL_CLASS)
        several = all(np.isin(small % 10, tenths[:share]).sum() > 1 for tenths in TENTHS)
        # Small classes stay whole. If they were split, a held-out record would have nothing to find. In a part of one class, it
        # could not miss.
        turn = np.where(sizes[codes[rows]] < SMALL_CLASS, codes[rows], turn) if several else turn
    check, judge = (rows[np.isin(turn % 10, tenths[:share])] for tenths in TENTHS)
    return rng.permutation(check)[:most], rng.permutation(judge)[:most]
