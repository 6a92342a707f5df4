"""Whether what moved is found: a filtered search of twenty ids while 50,000 records move to a server, and after.

    python tests/bench/found.py [RECORDS]

On a real Milvus server (in a network of its own) with the default index, PostgreSQL and three workers; prints JSON: how many of
the searches found fewer than all twenty, the seconds of each phase, and what mark and searches cost a batch.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import rmvdb.app
from rmvdb.engines.finding import not_found
from rmvdb.registry.codec import schema_from_json
from rmvdb.registry.mark import Owner
from rmvdb.upgrade.status import status
from tests.support.milvus_server import MilvusServer
from tests.support.postgres import Postgres
from tests.support.project import Project
from tests.support.waiting import seconds_of

RECORDS = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
WORKERS, BATCH, TOGETHER = 3, 500, 20
#: Seconds after which it has failed.
LONGEST = 3600.0


class Watch(threading.Thread):
    """An application that asks for twenty records by their keys, over and over."""

    def __init__(self, project: Project, seed: int) -> None:
        super().__init__(daemon=True)
        self._project, self._random, self.over = project, random.Random(seed), threading.Event()
        #: When each search was made, and how many of the twenty it found.
        self.found: list[tuple[float, int]] = []

    def run(self) -> None:
        """Search until it is over."""
        with self._project.client() as client:
            query = self._project.models().item(1)
            while not self.over.wait(0.1):
                ids = self._random.sample(range(1, RECORDS + 1), TOGETHER)
                began = time.monotonic()
                self.found.append((began, len(client.search(query, limit=50, filter=f"id in {ids}"))))


def main() -> None:
    """Run one upgrade. Two applications watch it from its deployment until a minute after its cut-over."""
    postgres, folder = Postgres(), Path(tempfile.mkdtemp(prefix="rmvdb-bench-"))
    try:
        with MilvusServer(folder / "milvus") as server:
            print(json.dumps(measured(folder, server.address, postgres.database())))
    finally:
        postgres.remove()


def measured(folder: Path, milvus: str, registry: str) -> dict[str, Any]:
    """Return the figures."""
    project = Project(folder / "project", milvus=milvus, registry=registry, batch=BATCH, retry_for=60.0)
    project.prepare([1], fill=False)
    fill(project)
    app = rmvdb.app.load(project.folder)
    app.store.settle(app.registry.plan("things").legs[0].collection)  # every search misses fresh rows
    watches = [Watch(project, seed) for seed in range(2)]
    for each in watches:
        each.start()
    time.sleep(10.0)
    moments = {"before": time.monotonic()}
    project.run("upgrade", "--from", "v1", "--to", "v2", "--method", "naive", "--order", "random", "--sample", "500", "--detach")
    workers = [project.start("worker") for _ in range(WORKERS)]
    moments["until all are copied"] = until(app, lambda now: now.t == 1.0)
    moments["until cut-over"] = until(app, lambda now: now.phase == "cut over")
    time.sleep(60.0)
    moments["a minute after"] = time.monotonic()
    for each in watches:
        each.over.set()
        each.join()
    for worker in workers:
        worker.terminate()
        worker.communicate(timeout=LONGEST)
    figures: dict[str, Any] = {"records": RECORDS}
    begins = moments["before"] - 10.0
    for name, ends in moments.items():
        found = Counter(count for each in watches for at, count in each.found if begins <= at < ends)
        fewer = {count: times for count, times in sorted(found.items()) if count < TOGETHER}
        figures[name] = {"seconds": round(ends - begins, 1), "searches": found.total(), "found_fewer": fewer}
        begins = ends
    figures |= costs(app)
    app.close()
    return figures


def fill(project: Project) -> None:
    """Write records of v1 by the client."""
    models = project.models()
    with project.client() as client:
        for first in range(1, RECORDS + 1, 1000):
            ids = range(first, min(first + 1000, RECORDS + 1))
            client.upsert([{"id": id, "item": models.item(id), "label": models.label(id)} for id in ids])


def until(app: Any, reached: Any) -> float:
    """Return when that was so."""
    end = time.monotonic() + LONGEST
    while not reached(status(app.registry, app.registry.gallery("things"))):
        if time.monotonic() > end:
            raise TimeoutError(str(status(app.registry, app.registry.gallery("things"))))
        time.sleep(0.5)
    return time.monotonic()


def costs(app: Any) -> dict[str, float]:
    """Median seconds of the mark and of the searches that a batch adds before its records leave."""
    owner, row = Owner(app.registry, app.store), app.registry.collection(app.registry.plan("things").legs[0].collection)
    ids = list(range(1, BATCH + 1))

    def look() -> None:
        held = [record.id for record in app.store.get(row.name, ids, fields=())]
        records = app.store.get(row.name, held[:TOGETHER], fields=(), vector=True)
        not_found(app.store, schema_from_json(row.schema), records, among=held)

    looked = [seconds_of(look) for _ in range(10)]
    marked = [seconds_of(lambda: owner.note("things", app.registry.raise_trace("things"))) for _ in range(10)]
    return {"mark_s": round(median(marked), 3), "searches_s": round(median(looked), 3)}


if __name__ == "__main__":
    main()
