"""One Milvus Lite file and many processes: who starts its server, who ends it, and what a kill -9 does."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from rmvdb.engines import lite
from rmvdb.engines.lite import locks
from rmvdb.engines.milvus import MilvusStore
from rmvdb.errors import DiskFull, EngineError, EngineUnavailable
from rmvdb.types import IdType, Index, Metric, Record, Schema
from tests.support.slow import slow
from tests.support.small_disk import on_small_disk

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes through /proc, which is Linux's")

IDLE = 1.0
SCHEMA = Schema(collection="c", dim=4, metric=Metric.L2, id_type=IdType.INT64)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A file that is not there yet."""
    file = tmp_path / "x.db"
    yield file
    lite.release(file)
    eventually(lambda: processes(file) == {}, "its processes have ended")


def store_on(path: Path) -> MilvusStore:
    return MilvusStore(functools.partial(lite.address, path, idle=IDLE))


def address_of(path: Path) -> str:
    return lite.address(path, idle=IDLE)


def record(id: int) -> Record:
    return Record(id=id, vector=np.full(4, id, np.float32))


def processes(path: Path) -> dict[str, int]:
    """Return the pids of the file's owner and server; two of a kind are an error, unless one of them is about to end."""
    deadline = time.monotonic() + 30
    while len(dict(found := _processes(path))) < len(found):
        assert time.monotonic() < deadline, f"two of a kind: {found}"
        time.sleep(0.05)
    return dict(found)


def _processes(path: Path) -> list[tuple[str, int]]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            arguments = (folder / "cmdline").read_bytes().decode().split("\0") if folder.name.isdigit() else []
        except (FileNotFoundError, ProcessLookupError):
            continue
        kinds = {"owner": "rmvdb.engines.lite" in arguments, "server": arguments[0].endswith("/milvus") if arguments else False}
        found += [(kind, int(folder.name)) for kind, fits in kinds.items() if fits and str(path) in arguments]
    return found


def eventually(holds: Callable[[], bool], what: str, *, within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.05)


def program(body: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """Start another process that runs `body`."""
    head = "import sys, os, time, functools, numpy as np\nfrom rmvdb.engines import lite\n"
    head += "from rmvdb.engines.milvus import MilvusStore\n"
    command = [sys.executable, "-c", head + textwrap.dedent(body), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload, no-any-return]


def ended(process: subprocess.Popen[str]) -> str:
    """Return the output of a process that ended well."""
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return str(said).strip()


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


def test_the_server_leaves_nothing_in_the_systems_temporary_folder_and_tells_of_no_search(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
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


@pytest.mark.parametrize("name", ["with space.db", "é日本.db", "a" * 120 + ".db", "it's 100%.db"])
def test_any_path_will_do(tmp_path: Path, name: str) -> None:
    folder = tmp_path / ("deep" * 20) / ("er" * 20)
    folder.mkdir(parents=True)
    path = folder / name
    store = store_on(path)
    try:
        store.create(SCHEMA, Index(type="FLAT"))
        store.upsert("c", [record(1)])
        assert store.count("c") == 1
        private = Path(address_of(path).removeprefix("unix:")).parent
        assert private.stat().st_mode & 0o077 == 0
    finally:
        store.close()
        lite.release(path)
    eventually(lambda: not private.exists(), "the private folder of the socket is gone")


def test_a_link_leads_to_the_same_server(path: Path) -> None:
    address = address_of(path)
    (path.parent / "link.db").symlink_to(path)
    assert address_of(path.parent / "link.db") == address


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nowhere/x\.db cannot be used: the folder .*nowhere does not exist; create it"):
        lite.address(tmp_path / "nowhere" / "x.db")
    with pytest.raises(EngineError, match=r"/sys/x\.db cannot be used: no permission to write /sys/\.x\.db"):
        lite.address("/sys/x.db")
    (tmp_path / "notes.db").write_text("these are notes, not a database")
    with pytest.raises(EngineError, match=r"notes\.db is not a Milvus Lite file; choose another path"):
        lite.address(tmp_path / "notes.db")


def test_a_database_of_the_other_generation_is_named(tmp_path: Path) -> None:
    (tmp_path / "three.db").mkdir()
    with pytest.raises(EngineError, match=r"made by Milvus Lite 3.*install milvus-lite>=3"):
        lite.address(tmp_path / "three.db")


def test_a_broken_file_is_named_with_what_milvus_lite_says(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + b"broken" * 1000)
    with pytest.raises(EngineUnavailable, match=rf"Milvus Lite does not open {path}: .*"):
        address_of(path)


PYMILVUS = """
from pymilvus import MilvusClient
try:
    client = MilvusClient(sys.argv[1])
except Exception as exc:
    print("refused", flush=True)
else:
    print("open", flush=True)
    sys.stdin.readline()
"""


def test_a_file_that_another_program_has_open_is_named(path: Path) -> None:
    other = program(PYMILVUS, path, stderr=subprocess.DEVNULL)
    assert other.stdout is not None
    assert other.stdout.readline() == "open\n"
    with pytest.raises(EngineUnavailable, match=rf"{path} is open in another program; close it there"):
        address_of(path)
    other.communicate("\n", timeout=60)
    assert address_of(path).startswith("unix:")


def test_another_program_is_kept_out_however_often_it_tries(path: Path) -> None:
    store = store_on(path)
    store.create(SCHEMA, Index(type="FLAT"))
    for _ in range(2):  # a refused pymilvus removes the lock's file: the second time nothing would keep it out
        assert ended(program(PYMILVUS, path, stderr=subprocess.DEVNULL)) == "refused"
        time.sleep(0.5)
    assert store.exists("c")
    store.close()


def test_a_search_never_misses_a_record_that_is_being_replaced(path: Path) -> None:
    store = MilvusStore(functools.partial(lite.address, path, idle=5.0), gate=functools.partial(lite.gate, path, patience=60.0))
    store.create(SCHEMA, Index(type="FLAT"))
    vectors = np.random.default_rng(0).normal(size=(300, SCHEMA.dim)).astype(np.float32)
    store.upsert("c", [Record(id=id, vector=vector) for id, vector in enumerate(vectors)])
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            store.upsert("c", [Record(id=id, vector=vectors[id]) for id in range(50)])

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        found = [len(hits) for _ in range(60) for hits in store.search("c", vectors[:5], limit=300)]
        known = [len(store.get("c", list(range(50)))) for _ in range(20)]
    finally:
        stop.set()
        writer.join()
    assert set(found) == {300}
    assert set(known) == {50}
    store.close()


#: Replaces records on a disk that is nearly full, then lets Lite read its file again.
NEARLY_FULL = """
import functools, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
from rmvdb.engines import lite
from rmvdb.errors import DiskFull
from rmvdb.engines.milvus import MilvusStore
from rmvdb.types import Field, IdType, Index, Metric, Record, Schema

path = Path(sys.argv[1]) / "x.db"
store = MilvusStore(functools.partial(lite.address, path, idle=1.0), gate=functools.partial(lite.gate, path, patience=60.0))
schema = Schema(collection="c", dim=4, metric=Metric.L2, id_type=IdType.INT64, dynamic=True)
store.create(schema, Index(type="FLAT"))
records = [Record(id=id, vector=np.full(4, id, np.float32), fields={"n": 0}) for id in range(1000)]
store.upsert("c", records)
with (path.parent / "filler").open("wb", buffering=0) as file:
    try:
        while file.write(bytes(65536)):
            pass
    except OSError:
        pass
    file.truncate(file.tell() - 34 * 2**20)


def replace(at):
    long = {"n": 1, "text": os.urandom(15_000).hex()}
    try:
        store.upsert("c", [Record(id=each.id, vector=each.vector, fields=long) for each in records[at : at + 200]])
    except DiskFull as exc:
        return str(exc)
    return "ok"


with ThreadPoolExecutor(5) as pool:  # of those that wait for one another each takes some of what is free
    print(*pool.map(replace, range(0, 1000, 200)), sep="\\n")
(path.parent / "filler").unlink()
store.close()
lite.release(path)
time.sleep(4.0)
again = MilvusStore(functools.partial(lite.address, path, idle=1.0))
print(len(again.get("c", list(range(1000)))), again.count("c"))
"""


def test_a_replacement_on_a_disk_that_is_nearly_full_loses_nothing(tmp_path: Path) -> None:
    *refused, left = on_small_disk(tmp_path, "64m", NEARLY_FULL).splitlines()
    said = f"The disk that holds {tmp_path}/x.db has less than 32 MiB free; make room, then write again"
    assert set(refused) == {"ok", said}
    assert refused.count(said) >= 3
    assert left == "1000 1000"


def test_a_process_suspended_inside_the_gate_delays_others_only_shortly(path: Path) -> None:
    with lite.gate(path, alone=False):
        began = time.monotonic()
        with lite.gate(path, alone=True, patience=0.3):
            assert 0.25 < time.monotonic() - began < 15.0
    began = time.monotonic()
    with lite.gate(path, alone=True), lite.gate(path, alone=False, patience=0.1):
        assert time.monotonic() - began < 15.0


def test_a_writer_without_the_gate_needs_room_for_others_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "ROOM", shutil.disk_usage(path.parent).free // 4)
    with lite.gate(path, alone=True):
        pass
    with lite.gate(path, alone=False), pytest.raises(DiskFull, match="make room"), lite.gate(path, alone=True, patience=0.1):
        pass
