"""Products of a few vectors with a matrix, each made by the thread that asks for it.

Libraries for matrices (OpenBLAS, MKL, those of torch) share out a product from some size on between all cores. Their threads then
wait for the next one by spinning: 20 ms after a product of 30 µs, on cores that the engine and other searches need. So a
matrix is divided here into blocks that such a library leaves to one thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rmvdb.types import Vectors

Floats = npt.NDArray[np.float32]

#: OpenBLAS shares out products of a vector with a matrix of 4 · 2,304 numbers or more.
BLOCK = 4 * 2304 - 1
#: Kernels take four rows of a matrix at a time.
ROWS = 4
#: Vectors that are multiplied at a time. A library shares out more of them, even with small blocks.
FEW = 16
#: From this many numbers on, a call is long enough for all cores.
MANY = 128


class Linear:
    """x ↦ x Wᵀ + b."""

    def __init__(self, weight: Floats, bias: Floats) -> None:
        """Take W (out, in) and b (out,)."""
        self.bias = bias
        out, into = weight.shape
        rows = BLOCK // into // ROWS * ROWS or max(BLOCK // into, 1)
        count = -(-out // rows)
        padded = weight if count * rows == out else np.zeros((count * rows, into), np.float32)
        if padded is not weight:
            padded[:out] = weight
        #: (out, in)
        self.weight: Floats = padded[:out]
        self._width = len(padded)
        #: (blocks, in, rows)
        self._blocks = padded.reshape(count, rows, into).swapaxes(1, 2)

    @property
    def parts(self) -> tuple[tuple[str, Floats], tuple[str, Floats]]:
        """Return W (out, in) and b (out,) by name."""
        return ("weight", self.weight), ("bias", self.bias)

    def __call__(self, x: Vectors) -> Vectors:
        """Map (n, in) to (n, out)."""
        if len(x) <= FEW:
            return self._few(x)
        if len(x) >= MANY:
            whole: Vectors = x @ self.weight.T + self.bias
            return whole
        return np.concatenate([self._few(x[at : at + FEW]) for at in range(0, len(x), FEW)])

    def _few(self, x: Vectors) -> Vectors:
        parts = np.matmul(x, self._blocks)  # (blocks, n, rows)
        product: Vectors = (parts if len(x) == 1 else parts.swapaxes(0, 1)).reshape(len(x), self._width)
        if self._width > len(self.bias):
            product = product[:, : len(self.bias)] + self.bias
        else:
            product += self.bias
        return product
