"""Adopt a collection of texts that pymilvus made, upgrade half of it, and search it by the same code before and after.

python examples/adopt_text_collection.py
"""

from collections import Counter
from multiprocessing import get_context

import numpy as np
from pymilvus import MilvusClient

import rmvdb
from terminal import empty_folder, run


class Letters:
    """A stand-in for a text model: it counts groups of letters."""

    def __init__(self, size):
        self.size = size

    def embed(self, texts):
        rows = np.zeros((len(texts), 64), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            for at in range(len(text) - self.size + 1):
                row[sum(text[at : at + self.size].lower().encode()) % 64] += 1
        return rows


v1, v2 = Letters(size=2), Letters(size=3)


def your_old_application():
    """Fill a collection as before rmvdb: embed, then insert."""
    texts = [
        f"Order {n}: the {what} arrived {how}." for n in range(60) for what in ("lamp", "chair") for how in ("late", "broken")
    ]
    milvus = MilvusClient("notes.db")
    milvus.create_collection("notes", dimension=64, metric_type="COSINE")
    milvus.insert("notes", [{"id": n, "text": text, "vector": v1.embed([text])[0]} for n, text in enumerate(texts)])


def search():
    """Search the gallery. This code does not know which model is on."""
    with rmvdb.connect(gallery="notes") as client:
        hits = client.search("Order 61: the lamp arrived broken.", limit=40, output_fields=["text"])
    print(f"  {hits[0].fields['text']} Hits of each collection: {dict(Counter(hit.leg for hit in hits))}", flush=True)


if __name__ == "__main__":
    with empty_folder():
        with get_context("spawn").Pool(1) as process:  # of its own, since pymilvus holds notes.db until its process ends
            process.apply(your_old_application)
        run("rmvdb init --milvus notes.db")
        run("rmvdb model add v1 --embedder adopt_text_collection:v1")
        run("rmvdb gallery add notes --model v1 --collection notes --source field:text")
        search()
        run("rmvdb model add v2 --embedder adopt_text_collection:v2")
        run("rmvdb upgrade --from v1 --to v2 --execute --until 0.5")  # --execute: records may leave your collection
        search()
