"""Bring two classes of your own: an embedder that takes options, and a source that knows where your items are.

python examples/own_embedder_and_source.py
"""

import hashlib

import numpy as np

import rmvdb
from terminal import empty_folder, run

ARTICLES = {f"{topic}-{n}": f"{topic} story {n}" for topic in ("chess", "rowing", "tennis") for n in range(100)}


class HashedWords:
    """An embedder: `embed` gives a row of float32 for each item, in order. `--options` are the arguments of the class."""

    def __init__(self, dim, letters):
        self.dim, self.letters = dim, letters

    def embed(self, items):
        rows = np.zeros((len(items), self.dim), dtype=np.float32)
        for row, text in zip(rows, items, strict=True):
            for word in text.split():
                row[int(hashlib.sha256(word[: self.letters].encode()).hexdigest(), 16) % self.dim] += 1
        return rows


class Articles:
    """A source: `load` gives items by id. rmvdb quarantines the records that it leaves out."""

    def load(self, records):
        return {record.id: ARTICLES[record.id] for record in records if record.id in ARTICLES}


def search(text):
    with rmvdb.connect(gallery="news") as client:
        print(f"  {text}: {', '.join(hit.id for hit in client.search(text, limit=3))}", flush=True)


if __name__ == "__main__":
    with empty_folder():
        run("rmvdb init")
        run("""rmvdb model add v1 --embedder own_embedder_and_source:HashedWords --options '{"dim": 32, "letters": 3}'""")
        run("rmvdb gallery add news --model v1 --id-type VARCHAR --source call:own_embedder_and_source:Articles")
        with rmvdb.connect(gallery="news") as client:
            client.upsert([{"id": name, "item": text} for name, text in ARTICLES.items()])
        search("rowing story 42")
        run("""rmvdb model add v2 --embedder own_embedder_and_source:HashedWords --options '{"dim": 200, "letters": 9}'""")
        run("rmvdb upgrade --from v1 --to v2", show=2)
        search("rowing story 42")
