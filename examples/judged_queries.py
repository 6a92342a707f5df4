"""Give rmvdb queries whose answers you know. The plan then chooses a method, and measures it, by these queries.

python examples/judged_queries.py
"""

import json
from pathlib import Path

import numpy as np

import rmvdb
from terminal import empty_folder, run


class Letters:
    """A stand-in for a text model: it counts groups of letters."""

    def __init__(self, size, dim):
        self.size, self.dim = size, dim

    def embed(self, texts):
        rows = np.zeros((len(texts), self.dim), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            for at in range(len(text) - self.size + 1):
                row[sum(text[at : at + self.size].lower().encode()) % self.dim] += 1
        return rows


v1, v2 = Letters(size=2, dim=64), Letters(size=3, dim=256)

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday"]
PLACES = ["harbour", "library", "market", "station", "garden", "castle", "museum", "bridge", "tower", "theatre"]
PAGES = [f"{day}: the {place} opens at {hour}." for day in DAYS for place in PLACES for hour in range(8, 18)]


if __name__ == "__main__":
    with empty_folder():
        run("rmvdb init")
        run("rmvdb model add v1 --embedder judged_queries:v1")
        run("rmvdb gallery add pages --model v1 --source field:text")
        with rmvdb.connect(gallery="pages") as client:
            client.upsert([{"id": at, "text": text} for at, text in enumerate(PAGES)])
        run("rmvdb model add v2 --embedder judged_queries:v2")

        # A line of JSON for each query, with the ids of all its answers. 80 queries or more: fewer measure, but do not choose.
        # rmvdb does not train on answers, so most records must be none.
        with Path("judged.jsonl").open("w") as file:
            for at, text in enumerate(PAGES[:100]):  # Monday's
                _, _, place, _, _, hour = text.removesuffix(".").split()
                print(json.dumps({"item": f"on Monday {place} at {hour}", "answers": [at]}), file=file)
        run("rmvdb plan --from v1 --to v2 --queries judged.jsonl", show=7)
