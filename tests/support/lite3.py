"""Milvus Lite 3, which takes the place of the Milvus Lite 2.5 in the tests' environment: installed into a folder of its own.

It comes without what it depends on, which the environment has.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmvdb.engines import lite

VERSION = "3.2.2"


@contextlib.contextmanager
def served(file: Path) -> Iterator[str]:
    """Give the address of a Milvus Lite 3 process that serves this new file; RuntimeError, with pip's words, without one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(_installed()), os.environ.get("PYTHONPATH")))))
        address = lite.address(file, idle=2.0)
    try:
        yield address
    finally:
        lite.release(file)


def _installed() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmvdb-tests"
    folder = cache / f"milvus-lite-{VERSION}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as half, contextlib.suppress(OSError):
            _install(Path(half) / "whole")
            (Path(half) / "whole").rename(folder)  # fails where another process was faster
    return folder


def _install(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, f"milvus-lite=={VERSION}"], check=False, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"Milvus Lite {VERSION} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
