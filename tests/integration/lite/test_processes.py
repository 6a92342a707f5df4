"""One Milvus Lite file and many processes: who starts its server, who ends it, and what a kill -9 does."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from rmvdb.engines import lite
from rmvdb.engines.lite import locks
from rmvdb.engines.milvus import MilvusStore
from rmvdb.errors import EngineUnavailable
from rmvdb.types import Index
from tests.support.lite_processes import IDLE, SCHEMA, address_of, ended, eventually, processes, program, record, store_on
from tests.support.slow import slow

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes through /proc, which is Linux's")


USER = """
address = lite.address(sys.argv[1], idle=1.0)
print(address, flush=True)
sys.stdin.readline()
"""


def test_two_processes_read_and_write_one_file(path: Path) -> None:
    store = store_on(path)
    store.create(SCHEMA, Index(type="FLAT"))
    store.upsert("c", [record(1)])

    other = program(
        """
        from rmvdb.types import Record
        store = MilvusStore(functools.partial(lite.address, sys.argv[1], idle=1.0))
        store.upsert("c", [Record(id=2, vector=np.zeros(4, np.float32))])
        print([record.id for record in store.get("c", [1, 2])])
        """,
        path,
    )

    assert ended(other) == "[1, 2]"
    assert [record.id for record in store.get("c", [1, 2])] == [1, 2]
    store.close()


def test_of_many_that_come_at_once_one_starts_the_server(path: Path) -> None:
    users = [program(USER, path, idle) for idle in range(6)]
    addresses = {str(user.stdout.readline()).strip() for user in users if user.stdout}
    assert len(addresses) == 1
    assert addresses == {address_of(path)}
    assert sorted(processes(path)) == ["owner", "server"]
    for user in users:
        user.communicate("\n", timeout=60)


def test_the_server_outlives_who_started_it(path: Path) -> None:
    starter = program(USER, path)
    assert starter.stdout is not None
    address = starter.stdout.readline().strip()
    first = processes(path)
    assert address_of(path) == address
    starter.kill()
    starter.communicate(timeout=60)
    assert address_of(path) == address
    time.sleep(2 * IDLE)
    assert processes(path) == first


def test_the_server_ends_at_once_though_who_started_it_ignores_interrupts(path: Path) -> None:
    """As what a shell script starts in the background does."""
    starter = program("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + USER, path)
    assert starter.stdout is not None
    starter.stdout.readline()
    os.kill(processes(path)["owner"], signal.SIGTERM)
    eventually(lambda: processes(path) == {}, "both have ended", within=locks.RELEASE / 2 - 0.5)
    starter.communicate("\n", timeout=60)


def test_an_interrupt_at_the_terminal_does_not_reach_the_server(path: Path) -> None:
    starter = program(USER, path, start_new_session=True)
    assert starter.stdout is not None
    starter.stdout.readline()
    first = processes(path)
    address_of(path)
    os.killpg(starter.pid, signal.SIGINT)
    starter.communicate(timeout=60)
    time.sleep(0.5)
    assert processes(path) == first


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("who", ["owner", "server"])
def test_a_killed_owner_or_server_is_replaced_and_nothing_is_lost(path: Path, who: str, how: signal.Signals) -> None:
    store = store_on(path)
    store.create(SCHEMA, Index(type="FLAT"))
    for id in range(20):
        store.upsert("c", [record(id)])
    first = processes(path)

    os.kill(first[who], how)

    assert store.count("c") == 20
    store.upsert("c", [record(20)])
    assert [hit.id for hit in store.search("c", np.full((1, 4), 20, np.float32), limit=2)[0]] == [20, 19]
    # One that was asked to end may have answered all of that before it did.
    deadline = time.monotonic() + 20
    while not set(first.values()).isdisjoint(processes(path).values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert store.count("c") == 21
    second = processes(path)
    assert sorted(second) == ["owner", "server"]
    assert set(first.values()).isdisjoint(second.values())
    store.close()


def answers(store: MilvusStore) -> bool:
    """Return whether it does, for ten records."""
    with suppress(EngineUnavailable):
        return store.count("c") == 10
    return False


def test_a_long_reading_waits_for_an_engine_that_is_silent_for_a_while(path: Path) -> None:
    store = MilvusStore(functools.partial(lite.address, path, idle=8.0), timeout=2.0, patience=30.0)
    store_on(path).create(SCHEMA, Index(type="FLAT"))
    store.upsert("c", [record(id) for id in range(10)])
    server = processes(path)["server"]
    os.kill(server, signal.SIGSTOP)  # for longer than two calls may take
    threading.Timer(7.0, os.kill, (server, signal.SIGCONT)).start()
    began = time.monotonic()
    assert [each.id for page in store.scan("c", page=3, vector=True) for each in page] == list(range(10))
    assert time.monotonic() - began > 6.0
    assert processes(path)["server"] == server
    impatient = MilvusStore(lambda: store._connection.place, timeout=2.0, patience=1.0)
    eventually(lambda: answers(impatient), "it answers again")
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(EngineUnavailable, match=r"gave no answer within 2 s; look at its load|Fail connecting"):
        impatient.count("c")
    os.kill(server, signal.SIGCONT)
    store.close()


def test_a_long_reading_gives_a_slow_engine_longer(path: Path, tmp_path: Path) -> None:
    """It would never answer many short calls, and have more to do by each."""
    store_on(path).create(SCHEMA, Index(type="FLAT"))
    store_on(path).upsert("c", [record(id) for id in range(10)])
    with slow(address_of(path), tmp_path, method="Query", seconds=3.0) as (place, asked):
        store = MilvusStore(lambda: place, timeout=2.0, patience=20.0)
        store.describe("c")
        assert [each.id for each in store.get("c", [1, 2])] == [1, 2]
        assert len(asked) == 2
        with pytest.raises(EngineUnavailable, match="gave no answer within 2 s"):
            store.get("c", [1, 2], strong=False)
        store.close()


def test_one_call_leaves_by_a_permit(path: Path, tmp_path: Path) -> None:
    """pymilvus asks for a collection's schema before a process upserts into it; that is over when the permit is asked."""
    store_on(path).create(SCHEMA, Index(type="FLAT"))
    with slow(address_of(path), tmp_path, method="DescribeCollection", seconds=0.0) as (place, described):
        store, permits = MilvusStore(lambda: place), list[float]()
        store.upsert("c", [record(1)], permit=lambda: permits.append(time.monotonic()))
        assert len(permits) == 1
        assert described
        assert max(described) < permits[0]
        store.close()


def test_a_server_whose_starter_was_killed_while_it_started_is_the_next_ones(path: Path) -> None:
    command = [sys.executable, "-m", "rmvdb.engines.lite", str(path), "--idle", "30"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as starting:
        eventually(lambda: "server" in processes(path), "it begins")
        address = address_of(path)
        assert starting.stdout is not None
        assert starting.stdout.read().decode() == address
    assert sorted(processes(path)) == ["owner", "server"]


def test_no_server_is_left_behind_by_a_killed_owner(path: Path) -> None:
    address_of(path)
    os.kill(processes(path)["owner"], signal.SIGKILL)
    eventually(lambda: processes(path) == {}, "the server has ended with its owner")


def test_the_owner_ends_once_no_process_has_used_the_file_for_a_while(path: Path) -> None:
    users = [program(USER, path) for _ in range(2)]
    for user in users:
        assert user.stdout is not None
        user.stdout.readline()
    time.sleep(2 * IDLE)
    assert sorted(processes(path)) == ["owner", "server"]  # in use, however quiet

    users[0].communicate("\n", timeout=60)
    gone = time.monotonic()
    users[1].kill()
    users[1].communicate(timeout=60)
    eventually(lambda: processes(path) == {}, "the owner and its server have ended")
    assert time.monotonic() - gone > 0.5 * IDLE
    assert sorted(file.name for file in path.parent.iterdir()) == [
        ".x.db.address",
        ".x.db.lease",
        ".x.db.lock",
        ".x.db.log",
        "x.db",
    ]


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary folder whose name leaves room for a socket's: its path has 107 characters at most."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder:
        yield Path(folder)


def test_the_server_leaves_nothing_in_the_systems_temporary_folder_and_tells_of_no_search(
    path: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = short
    monkeypatch.setenv("TMPDIR", str(temporary))
    for name in ("GLOG_logtostderr", "GLOG_minloglevel"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):  # it says something when it finds a collection
        store = store_on(path)
        store.create(SCHEMA, Index(type="FLAT"))
        store.upsert("c", [record(1)])
        store.search("c", record(1).vector[None, :], limit=1)  # type: ignore[index]
        store.close()
        assert path.with_name(f".{path.name}.log").read_text() == ""
        lite.release(path)
        eventually(lambda: processes(path) == {}, "its processes have ended")

    assert list(temporary.glob("milvus*")) == []


def test_a_file_is_there_again_after_its_server_has_ended(path: Path) -> None:
    store = store_on(path)
    store.create(SCHEMA, Index(type="FLAT"))
    store.upsert("c", [record(1), record(2)])
    store.close()
    lite.release(path)
    eventually(lambda: processes(path) == {}, "the owner and its server have ended")
    assert store.count("c") == 2
    store.close()


def test_newcomers_and_an_ending_owner_never_miss_each_other(path: Path) -> None:
    body = """
    import random
    store = MilvusStore(functools.partial(lite.address, sys.argv[1], idle=0.05))
    for turn in range(12):
        assert store.exists("nothing") is False
        store.close()
        lite.release(sys.argv[1])
        time.sleep(random.uniform(0.0, 0.4))
    """
    for user in [program(body, path) for _ in range(3)]:
        ended(user)


@pytest.mark.parametrize("left", ["", "unix:/nowhere/sock", "nonsense", "unix:" + "x" * 300])
def test_an_address_that_is_no_longer_true_is_replaced(path: Path, left: str) -> None:
    (path.parent / ".x.db.address").write_text(left)
    (path.parent / ".x.db.sock").write_text("a stale socket")
    assert store_on(path).exists("c") is False
