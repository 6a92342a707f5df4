"""A program on a disk of its own that is soon full."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def on_small_disk(folder: Path, size: str, body: str) -> str:
    """What the Python program prints, whose first argument is this folder, a tmpfs of that size (512k) by then."""
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel lets no user mount a small disk of their own")
    mounted = f'mount -t tmpfs -o size={size} none "$1" && exec "$2" -c "$3" "$1"'
    command = [unshare, "-rm", "sh", "-c", mounted, "sh", str(folder), sys.executable, body]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
