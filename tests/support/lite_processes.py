"""The processes of a Milvus Lite file, and programs that use it."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rmvdb.engines import lite
from rmvdb.engines.milvus import MilvusStore
from rmvdb.types import IdType, Metric, Record, Schema

#: Seconds after which the owner of an unused file ends.
IDLE = 1.0
SCHEMA = Schema(collection="c", dim=4, metric=Metric.L2, id_type=IdType.INT64)


def store_on(path: Path) -> MilvusStore:
    """Return a store on the file, whose server is started if need be."""
    return MilvusStore(functools.partial(lite.address, path, idle=IDLE))


def address_of(path: Path) -> str:
    """Return the address of the file's server."""
    return lite.address(path, idle=IDLE)


def record(id: int) -> Record:
    """Return a record of SCHEMA."""
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
    """Wait until it holds."""
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
