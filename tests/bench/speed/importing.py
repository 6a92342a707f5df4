"""Importing rmvdb and connecting, against importing pymilvus: seconds of a processor, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.speed.row import Options, Row, compared
from tests.support.project import Project

CONNECT = "import rmvdb; client = rmvdb.connect(); client.close()"
#: Processes of each side.
MOST = 5


def measure(options: Options) -> Iterator[Row]:
    """Measure on a project with a Milvus Lite file, whose engine runs already."""
    with tempfile.TemporaryDirectory(prefix="rmvdb-bench-") as folder:
        project = Project(Path(folder)).prepare(list(range(20)))
        try:
            with project.client():  # keeps the engine up
                sides: dict[str, list[float]] = {"connect": [], "pymilvus": [], "status": []}
                for _ in range(min(MOST, max(1, options.calls // 6))):
                    sides["connect"].append(_cpu(project, "-c", CONNECT))
                    sides["pymilvus"].append(_cpu(project, "-c", "import pymilvus"))
                    sides["status"].append(_cpu(project, "-m", "rmvdb", "status"))
        finally:
            project.stop_engine()
    against = "import pymilvus"
    yield compared("import rmvdb and connect", sides["connect"], sides["pymilvus"], against=against, target=1.3, unit="s CPU")
    yield compared("rmvdb status", sides["status"], sides["pymilvus"], against=against, target=1.3, unit="s CPU")


def _cpu(project: Project, *words: str) -> float:
    """Return the seconds of a processor that a Python takes: other work on the machine changes them least."""
    process = subprocess.Popen([sys.executable, *words], cwd=project.folder, env=project.environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    return used.ru_utime + used.ru_stime
