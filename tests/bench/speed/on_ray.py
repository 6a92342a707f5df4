"""Two actors on Ray against one, where the embedder is the bottleneck: it waits, as one that calls a service does."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rmvdb.app.wiring import App
from tests.bench.speed.row import Options, Row, compared
from tests.support.project import Project
from tests.support.scratch import prefer_memory
from tests.support.waiting import wait_until

UPGRADE = ("upgrade", "--from", "v1", "--to", "v2", "--method", "naive", "--order", "random", "--sample", "70", "--detach")
#: Seconds for which the embedder waits for each record, and seconds before each look at how fast actors are.
EACH, WARM = 0.03, 8.0
#: How many actors work in each turn, so that drifts cancel out.
TURNS = (1, 2, 2, 1, 1, 2)


def measure(options: Options) -> Iterator[Row]:
    """Measure on Milvus Lite and SQLite. A look takes a third of `seconds`."""
    prefer_memory()  # a registry on SQLite waits for the disk at each commit
    look = max(options.seconds / 3, 1.0)
    records = int(1.5 * sum(TURNS) * (look + 2 * WARM) / EACH)  # more than all turns can move
    with tempfile.TemporaryDirectory(prefix="rmvdb-bench-") as folder:
        project = Project(Path(folder) / "project", retry_for=60.0).prepare(range(records))
        project.fault(v2={"slow": EACH})
        project.run(*UPGRADE)
        rates: dict[int, list[float]] = {1: [], 2: []}
        with project.opened() as app:
            upgrade = app.registry.upgrades()[-1].id
            for actors in TURNS:
                rates[actors].append(_rate(project, app, upgrade, actors, look))
        project.stop_engine()
    name = "two actors on Ray, the embedder waits"
    yield compared(name, rates[2], rates[1], against="one actor", target=1.8, unit="records/s", better="higher")


def _rate(project: Project, app: App, upgrade: int, actors: int, look: float) -> float:
    """Return how many records the actors copy in a second."""
    command = project.start("worker", "--engine", "ray", "--actors", str(actors))
    wait_until(lambda: len(app.registry.workers(upgrade, within=10.0)) == actors)
    time.sleep(WARM)
    before, began = app.registry.progress(upgrade).done, time.monotonic()
    time.sleep(look)
    rate = (app.registry.progress(upgrade).done - before) / (time.monotonic() - began)
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=120)
    return rate
