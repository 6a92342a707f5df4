"""An application is suspended between what it announced and what it writes, for longer than a write may last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.conftest import NAIVE
from tests.support.project import Project
from tests.support.waiting import wait_for_processes

#: Writes record 3, and is suspended by itself once that is announced; a write lasts eight seconds here. It is not suspended while
#: its thread that asks for plans is amid a transaction: SQLite's only lock would stay with it.
APPLICATION = """
import os, signal, sys, threading
import rmvdb, rmvdb.serving.announced_writes
from rmvdb import errors
from rmvdb.registry import manifest_rows
from rmvdb.registry.registry import Registry
from models import item

rmvdb.serving.announced_writes.WRITE_LASTS = 8.0
real = Registry.open_intents
nobody_else = threading.RLock()

class OneAtATime(manifest_rows.WatchedSession):
    def __enter__(self):
        nobody_else.acquire()
        return super().__enter__()

    def __exit__(self, *exception):
        try:
            super().__exit__(*exception)
        finally:
            nobody_else.release()

manifest_rows.WatchedSession = OneAtATime

def announced(*args, **options):
    opened = real(*args, **options)
    if opened is not None:
        print("announced", flush=True)
        with nobody_else:
            os.kill(os.getpid(), signal.SIGSTOP)
    return opened

with rmvdb.connect(".") as client:
    client.search(item(1), limit=1)
    Registry.open_intents = announced
    try:
        {write}
    except errors.EngineError as exc:
        print(exc, flush=True)
        sys.exit(3)
"""

WRITES = {"upsert": 'client.upsert([{"id": 3, "item": item(300), "label": 1}])', "delete": "client.delete([3])"}


@pytest.mark.parametrize("write", WRITES)
def test_a_late_write_is_not_made_and_the_client_hears_so(project: Project, write: str) -> None:
    project.ask(*NAIVE, "--until", "0.5")
    (project.folder / "application.py").write_text(APPLICATION.replace("{write}", WRITES[write]))
    process = subprocess.Popen(
        [sys.executable, "application.py"], cwd=project.folder, env=project.environment, stdout=subprocess.PIPE, text=True
    )
    project.started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "announced\n"
    wait_for_processes(lambda: Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
    models = project.models()
    with project.client() as client:  # waits until the other's deadline is over
        client.upsert([{"id": 3, "item": models.item(3), "label": 42}])
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate(timeout=60)
        assert (process.returncode, said) == (3, "Writing 1 record of 'things' took longer than 8 s; repeat the write\n")
        assert client.get([3])[0].fields["label"] == 42
        project.ask(*NAIVE)
        assert client.get([3])[0].fields["label"] == 42
        assert client.search(models.item(3), limit=1)[0].id == 3
