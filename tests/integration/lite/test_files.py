"""Which files Milvus Lite opens, under which paths, and what is said of the others."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from rmvdb.engines import lite
from rmvdb.errors import EngineError, EngineUnavailable
from rmvdb.types import Index
from tests.support.lite_processes import SCHEMA, address_of, ended, eventually, program, record, store_on

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes through /proc, which is Linux's")


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


@pytest.mark.parametrize("deep", ["", "deep" * 25], ids=["beside", "in a temporary folder"])
def test_a_copied_folder_has_a_server_of_its_own(tmp_path: Path, deep: str) -> None:
    """The copied address named the server of the original, and what the copy deleted was gone from the original."""
    original, copy = tmp_path / f"original{deep}" / "x.db", tmp_path / f"copy{deep}" / "x.db"
    original.parent.mkdir()
    stores = [store_on(original)]
    try:
        stores[0].create(SCHEMA, Index(type="FLAT"))
        stores[0].upsert("c", [record(1), record(2)])
        subprocess.run(["cp", "-r", original.parent, copy.parent], check=True)
        stores.append(store_on(copy))
        stores[1].delete("c", [1])
        assert [store.count("c") for store in stores] == [2, 1]
        assert address_of(original) != address_of(copy)
    finally:
        for store in stores:
            store.close()
        lite.release(original)
        lite.release(copy)


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
