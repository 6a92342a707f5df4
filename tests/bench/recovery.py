"""How long until work goes on after a worker's death and a server's return; what Strong costs; what a second worker brings.

    python tests/bench/recovery.py

On a real Milvus server (in a network of its own) and SQLite, lease 9 s and longest call 3 s; prints JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import rmvdb.app
from rmvdb.registry.shared_queries import BEGUN
from tests.support.milvus_server import MilvusServer
from tests.support.project import Project
from tests.support.waiting import seconds_of

IDS = list(range(1, 10_001))
#: Seconds of each look at how fast workers are, and before it.
LOOK, WARM = 20.0, 8.0
LONGEST = 120.0
UPGRADE = ("upgrade", "--from", "v1", "--to", "v2", "--method", "naive", "--order", "random", "--sample", "70", "--detach")


def main() -> None:
    """Measure each on one gallery of 10,000 records."""
    folder = Path(tempfile.mkdtemp(prefix="rmvdb-bench-"))
    with MilvusServer(folder / "milvus") as server:
        project = Project(folder / "project", milvus=server.address, retry_for=60.0).prepare(IDS)
        found: dict[str, Any] = {"strong_search": strong(project)}
        project.fault(v2={"slow": 0.03})  # the embedder is the bottleneck
        project.run(*UPGRADE)
        app = rmvdb.app.load(project.folder)
        upgrade = app.registry.upgrades()[-1].id
        found["records_per_second"] = workers(project, app, upgrade)
        found["takeover_s"] = [takeover(project, app, upgrade) for _ in range(4)]
        found["server_back_s"] = [server_back(project, server, app, upgrade) for _ in range(3)]
        app.close()
    print(json.dumps(found))


def strong(project: Project) -> dict[str, float]:
    """Median seconds of a Strong search, and of a Bounded one, taken in turn."""
    item = project.models().item(1)
    with project.client() as client:
        strong, bounded = [], []
        for _ in range(5):
            strong += [seconds_of(lambda: client.search(item, consistency="Strong")) for _ in range(10)]
            bounded += [seconds_of(lambda: client.search(item)) for _ in range(10)]
    return {"strong_s": median(strong), "bounded_s": median(bounded), "ratio": median(strong) / median(bounded)}


def workers(project: Project, app: Any, upgrade: int) -> dict[str, float]:
    """Records that one worker copies in a second, that two do, and their ratio; one, two, two, one, so that drifts cancel out."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for count in (1, 2, 2, 1):
        started = [project.start("worker") for _ in range(count)]
        _wait(lambda: all(_held(app, upgrade, each.pid) for each in started))  # noqa: B023 (asked within this turn)
        time.sleep(WARM)
        before, began = app.registry.progress(upgrade).done, time.monotonic()
        time.sleep(LOOK)
        rates[count].append((app.registry.progress(upgrade).done - before) / (time.monotonic() - began))
        for each in started:
            each.terminate()
            each.communicate(timeout=LONGEST)
    one, two = (sum(rates[count]) / len(rates[count]) for count in (1, 2))
    return {"one": round(one, 1), "two": round(two, 1), "ratio": round(two / one, 2)}


def takeover(project: Project, app: Any, upgrade: int) -> float:
    """Return the seconds from the kill of a worker until another worker has claimed its batch."""
    doomed = project.start("worker")
    batch = _wait(lambda: _held(app, upgrade, doomed.pid))
    heir = project.start("worker")
    time.sleep(3)
    batch = _wait(lambda: _held(app, upgrade, doomed.pid))
    doomed.kill()
    killed = time.monotonic()
    _wait(lambda: next(row.token for row in app.registry.batches(upgrade, limit=10_000) if row.id == batch.id) > batch.token)
    taken = time.monotonic() - killed
    heir.terminate()
    heir.communicate(timeout=LONGEST)
    doomed.communicate()
    return round(taken, 1)


def server_back(project: Project, server: MilvusServer, app: Any, upgrade: int) -> float:
    """Seconds from the moment that a killed server is healthy again until the next record is moved."""
    worker = project.start("worker")
    _wait(lambda: _held(app, upgrade, worker.pid))
    server.stop(kill=True)
    time.sleep(2)
    server.start()
    back, before = time.monotonic(), app.registry.progress(upgrade).done
    _wait(lambda: app.registry.progress(upgrade).done > before)
    gone_on = time.monotonic() - back
    worker.terminate()
    worker.communicate(timeout=LONGEST)
    return round(gone_on, 1)


def _held(app: Any, upgrade: int, pid: int) -> Any:
    rows = app.registry.batches(upgrade, limit=10_000)
    return next((row for row in rows if row.state in BEGUN and f":{pid}:" in (row.worker or "")), None)


def _wait(found: Any) -> Any:
    end = time.monotonic() + LONGEST
    while not (value := found()):
        if time.monotonic() > end:
            raise TimeoutError(f"nothing happened within {LONGEST:g} s")
        time.sleep(0.05)
    return value


if __name__ == "__main__":
    main()
