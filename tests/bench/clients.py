"""The load of applications on the registry: one upgrade without any, and one beside 200 that connected at once.

    python tests/bench/clients.py [CLIENTS]

On Milvus Lite with the default times, on SQLite and on a PostgreSQL with its default of 100 connections; prints JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.postgres import Postgres
from tests.support.project import Project
from tests.support.waiting import seconds_of

CLIENTS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
PROCESSES = 4
IDS = list(range(1, 2_001))
UPGRADE = ("upgrade", "--method", "naive", "--order", "random", "--sample", "70")
#: Connects so many clients at once, says when each has searched, and keeps them until it is killed.
HOLD = """
import sys, threading, time, rmvdb, models
begun, clients = time.monotonic(), []
def connect():
    client = rmvdb.connect(".")
    client.search(models.item(1), limit=1)
    clients.append(client)
threads = [threading.Thread(target=connect) for _ in range(int(sys.argv[1]))]
[each.start() for each in threads]
[each.join() for each in threads]
print(len(clients), time.monotonic() - begun, flush=True)
time.sleep(3600)
"""


def main() -> None:
    """Measure both registries."""
    postgres, folder = Postgres(), Path(tempfile.mkdtemp(prefix="rmvdb-bench-"))
    try:
        print(
            json.dumps(
                {name: measured(folder / name, url) for name, url in (("sqlite", None), ("postgres", postgres.database()))}
            )
        )
    finally:
        postgres.remove()


def measured(folder: Path, registry: str | None) -> dict[str, Any]:
    """Measure one upgrade alone, then one back to the first version beside the clients."""
    project = Project(folder, registry=registry, retry_for=60.0)
    text = (folder / "rmvdb.toml").read_text()
    (folder / "rmvdb.toml").write_text(text.replace("plan_max_age = 0.6\nlongest_search = 1.5\n", ""))
    project.prepare(IDS)
    alone = seconds_of(lambda: upgrade(project, "v1", "v2"))
    held = [_hold(project) for _ in range(PROCESSES)]
    told = [each.stdout.readline().split() for each in held]  # type: ignore[union-attr]
    beside = seconds_of(lambda: upgrade(project, "v2", "v1"))
    for each in held:
        each.kill()
        each.communicate()
    project.stop_engine()
    return {
        "clients": sum(int(count) for count, _ in told),
        "connected_s": round(max(float(seconds) for _, seconds in told), 1),
        "alone_s": round(alone, 1),
        "beside_s": round(beside, 1),
        "ratio": round(beside / alone, 2),
    }


def upgrade(project: Project, one: str, other: str) -> None:
    """Upgrade from one version to the other, to the end."""
    project.run(*UPGRADE, "--from", one, "--to", other, timeout=1800)
    project.run("cleanup", "--yes", timeout=600)


def _hold(project: Project) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLD, str(CLIENTS // PROCESSES)]
    return subprocess.Popen(words, cwd=project.folder, env=project.environment, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    main()
