"""Excerpts of texts, which stand in for the searches of a text gallery whose real queries are unknown.

A search is shorter than the texts that it finds. So distances of whole texts to each other are of another scale than those of
searches, and maps that keep whole texts near each other can still lose searches (docs/choosing.md has the figures).
"""

from __future__ import annotations

import numpy as np

from rmvdb.types import Item

#: Words of an excerpt. A text that is not longer than the most is kept whole.
LEAST_WORDS, MOST_WORDS = 6, 18


def excerpt(item: Item, rng: np.random.Generator) -> Item:
    """Return some successive words of a long text, drawn at random. Another item is returned as it is."""
    words = item.split() if isinstance(item, str) else []
    if len(words) <= MOST_WORDS:
        return item
    count = int(rng.integers(LEAST_WORDS, MOST_WORDS + 1))
    start = int(rng.integers(len(words) - count + 1))
    return " ".join(words[start : start + count])
