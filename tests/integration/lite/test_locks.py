"""Milvus Lite's files are their owner's alone, and no wait for a lock is without end."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmvdb.engines import lite
from rmvdb.engines.lite import lease, locks
from rmvdb.errors import EngineUnavailable
from tests.support.descriptors import few_descriptors
from tests.support.spawned import run_spawned


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "x.db"
    yield file
    lite.release(file)


def open_to_others(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if stat.S_IMODE(file.lstat().st_mode) & 0o077}


def test_only_their_owner_can_open_the_files_and_older_files_become_so(path: Path) -> None:
    before = os.umask(0o022)
    try:
        for name in ("address", "lease", "lock", "log", "turn", "room"):
            (path.parent / f".x.db.{name}").touch()
        path.touch()
        assert len(open_to_others(path.parent)) == 7
        lite.address(path, idle=1.0)
        with lite.gate(path, alone=True):
            assert open_to_others(path.parent) == set()
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["lease", "address"])
def test_a_lock_that_another_process_keeps_is_not_waited_for_without_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(locks, "_PATIENCE", 0.5)
    with (path.parent / f".x.db.{name}").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(EngineUnavailable, match=rf"\.x\.db\.{name} is locked by another process for over 0\.5 s; end that"):
            lite.address(path, idle=1.0)
    assert lite.address(path, idle=1.0).startswith("unix:")


def test_a_reader_of_the_address_waits_for_no_lock(path: Path) -> None:
    address = lite.address(path, idle=5.0)
    with (path.parent / ".x.db.address").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        assert lite.address(path, idle=5.0) == address
        assert time.monotonic() - began < 5.0


def _fork_while_the_server_starts(file: Path) -> None:
    real, children = lease._start_owner, list[int]()

    def start(*args: object) -> str:
        children.append(os.fork())
        if not children[0]:
            signal.pause()
        return real(*args)  # type: ignore[arg-type]

    lease._start_owner = start  # type: ignore[assignment]
    lite.address(file, idle=1.0)
    try:
        with (file.parent / ".x.db.address").open("ab") as free:
            fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(children[0], signal.SIGKILL)


def test_a_process_that_was_forked_while_the_server_started_does_not_keep_the_lock_of_its_address(tmp_path: Path) -> None:
    run_spawned(_fork_while_the_server_starts, tmp_path / "x.db", seconds=120)


def test_a_server_that_does_not_start_is_started_more_and_more_rarely(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"SQLite format 3\0" + b"broken" * 1000)
    starts, real = list[float](), lease._start_owner

    def start(*args: object) -> str:
        starts.append(time.monotonic())
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(lease, "_start_owner", start)
    end = time.monotonic() + 4.0
    said = set()
    while time.monotonic() < end:
        with pytest.raises(EngineUnavailable, match="Milvus Lite does not open") as refused:
            lite.address(path, idle=1.0)
        said.add("starts failed; the next one may be made in" in str(refused.value))
        time.sleep(0.02)
    assert len(starts) <= 4
    assert said == {False, True}
    path.unlink()  # what is put right is tried at once
    assert lite.address(path, idle=1.0).startswith("unix:")


def test_no_free_descriptor_is_said_so(path: Path) -> None:
    lite.address(path, idle=5.0)
    with few_descriptors():
        for call in (lambda: lite.address(path, idle=5.0), lambda: lite.gate(path, alone=False).__enter__()):
            with pytest.raises(EngineUnavailable, match=r"no free file descriptor.*ulimit -n"):
                call()
    assert lite.address(path, idle=5.0).startswith("unix:")
