"""A forked child does not wait for locks that threads of its parent hold."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from rmvdb.engines.milvus import driver
from rmvdb.items import objects
from rmvdb.serving import loaded_models, query_keeper
from rmvdb.timing import uptime
from tests.support.spawned import run_spawned

LOCKS = (loaded_models._one_model_at_a_time, driver._loading, objects._importing, uptime._lock)


def _fork_while_another_thread_holds_them(_: Path) -> None:
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCKS[0].now, LOCKS[1].now, LOCKS[2].now, LOCKS[3].now:
            held.set()
            end.wait(60.0)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60.0)
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends it
        for lock in LOCKS:
            with lock.now:
                pass
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    end.set()
    thread.join()


def test_a_child_finds_the_locks_of_its_parents_threads_free(tmp_path: Path) -> None:
    run_spawned(_fork_while_another_thread_holds_them, tmp_path, seconds=120)


def _draw_in_two_children(_: Path) -> None:
    drawn = []
    for _number in range(2):
        reading, writing = os.pipe()
        if not os.fork():
            os.write(writing, str(query_keeper._random.random()).encode())
            os._exit(0)
        os.wait()
        drawn.append(os.read(reading, 100))
    assert drawn[0] != drawn[1]


def test_forked_children_keep_different_queries(tmp_path: Path) -> None:
    run_spawned(_draw_in_two_children, tmp_path, seconds=60)
