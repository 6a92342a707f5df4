"""Sentences of words that have synonyms, and two models of them: no file is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

TOPICS, SENSES, SYNONYMS, WORDS = 30, 12, 4, 14
#: Senses of a sentence that are not of its topic.
OTHERS = 6


def collection(seed: int, texts: int, queries: int) -> tuple[list[str], list[str], np.ndarray]:
    """Return texts, shorter queries, and which texts are of a query's topic (Q, G). A word is `topic.sense.synonym`."""
    rng = np.random.default_rng(seed)
    topic_of_text, topic_of_query = (rng.integers(TOPICS, size=count) for count in (texts, queries))
    stored = [_sentence(rng, topic, WORDS, OTHERS) for topic in topic_of_text]
    asked = [_sentence(rng, topic, WORDS // 2, OTHERS // 2) for topic in topic_of_query]
    return stored, asked, topic_of_query[:, None] == topic_of_text[None, :]


def _sentence(rng: np.random.Generator, topic: int, words: int, others: int) -> str:
    topics = [topic] * (words - others) + rng.integers(TOPICS, size=others).tolist()
    return " ".join(f"{each}.{rng.integers(SENSES)}.{rng.integers(SYNONYMS)}" for each in topics)


class Hashing:
    """The mean of its words' vectors. `knows` is the weight of what synonyms share, so it says how well the model knows them."""

    def __init__(self, name: str, dim: int, knows: float) -> None:
        self.name, self.dim, self.knows = name, dim, knows

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return what it consists of, for the fingerprint."""
        return {"seed": np.frombuffer(self.name.encode(), np.uint8), "knows": np.array([self.knows], np.float32)}

    def embed(self, items: Sequence[str]) -> np.ndarray:
        """(n, dim), of length 1."""
        found = np.stack([np.mean([self._word(word) for word in item.split()], axis=0) for item in items])
        return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)

    def _word(self, word: str) -> np.ndarray:
        topic, sense, *_ = f"{word}..".split(".")  # any text may come: rmvdb probes a model with some of its own
        return self._vector(word) + self.knows * (self._vector(f"{topic}.{sense}") + 0.5 * self._vector(topic))

    def _vector(self, text: str) -> np.ndarray:
        digest = hashlib.sha256(f"{self.name} {text}".encode()).digest()
        return np.random.default_rng(np.frombuffer(digest, np.uint32)).normal(size=self.dim)
