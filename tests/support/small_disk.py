"""Programs on a disk of their own, which is soon full, or read-only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def on_small_disk(folder: Path, size: str, body: str) -> str:
    """Return the output of the Python program. Its first argument is this folder, on which a tmpfs of that size (512k) is
    mounted."""
    unshare = _unshare()
    mounted = f'mount -t tmpfs -o size={size} none "$1" && exec "$2" -c "$3" "$1"'
    command = [unshare, "-rm", "sh", "-c", mounted, "sh", str(folder), sys.executable, body]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def with_read_only(folder: Path) -> list[str]:
    """Return the beginning of a command that runs where this folder, with what is in it, is a disk of its own, mounted
    read-only."""
    steps = (
        'here="$1"', "shift", 'cp -a "$here" "$here.before"', 'mount -t tmpfs -o mode=0700 none "$here"',
        'cp -a "$here.before/." "$here"', 'mount -o remount,ro "$here"', 'exec "$@"',
    )  # fmt: skip
    return [_unshare(), "-rm", "sh", "-c", " && ".join(steps), "sh", str(folder)]


def _unshare() -> str:
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel lets no user mount a disk of their own")
    return unshare
