"""A process whose threads use a registry in SQLite forks, and its children use the same file."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from rmvdb.registry import forking
from rmvdb.registry.registry import Registry
from tests.support.registries import another
from tests.support.spawned import run_spawned

CHILDREN = 12


def _fork_while_threads_write(folder: Path) -> None:
    parent = another(folder / "registry")
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            parent.retire_worker("nobody")

    threads = [threading.Thread(target=write) for _ in range(3)]
    for each in threads:
        each.start()
    try:
        for _ in range(CHILDREN):
            child = os.fork()
            if not child:
                signal.alarm(20)  # ends it
                Registry(parent.url.render_as_string()).retire_worker("nobody")
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            parent.retire_worker("nobody")
            time.sleep(0.02)
    finally:
        stop.set()
        for each in threads:
            each.join()


def test_children_of_a_process_that_writes_are_not_blocked(tmp_path: Path) -> None:
    """Without the wait, most children waited for a lock that their parent had had as it forked."""
    run_spawned(_fork_while_threads_write, tmp_path, seconds=300)


def test_a_thread_may_fork_within_a_call_and_a_call_without_end_does_not_keep_others_from_forking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forking, "_PATIENCE", 0.2)
    begun, end = threading.Event(), threading.Event()

    def long_call() -> None:
        with forking.call():
            begun.set()
            end.wait(60.0)

    with forking.call(), forking.call():
        forking._before()
        forking._in_parent()
        thread = threading.Thread(target=long_call)
        thread.start()
        assert begun.wait(60.0)
    forking._before()
    forking._in_parent()
    end.set()
    thread.join()
    assert forking._calls == {}
