"""Where temporary files of the tests go."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
#: Bytes that must be free there, and in the machine's memory: they hold the files and the processes.
ROOM, AVAILABLE = 6 * 2**30, 14 * 2**30


def prefer_memory() -> None:
    """Let this process and its children keep temporary files in memory if there is plenty, unless TMPDIR names a folder.

    Each commit of a registry on SQLite waits for the disk. On one that takes 50 ms for it, half a dozen tests at once keep each
    other waiting for longer than they wait for a registry.
    """
    with contextlib.suppress(OSError):
        if "TMPDIR" in os.environ or shutil.disk_usage(MEMORY).free < ROOM or _available() < AVAILABLE:
            return
        folder = MEMORY / f"rmvdb-tests-{os.getuid()}"  # what killed runs leave is taken away by `make clean`
        folder.mkdir(exist_ok=True)
        folder.chmod(0o711)  # PostgreSQL does not run as root
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None  # look again


def _available() -> int:
    """Return the free bytes of the machine, or of the container."""
    found = re.search(r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    left = [int(found[1]) * 1024 if found else 0]
    group = Path("/sys/fs/cgroup")
    if (limit := group / "memory.max").exists() and (most := limit.read_text().strip()).isdigit():
        left.append(int(most) - int((group / "memory.current").read_text()))
    return min(left)
