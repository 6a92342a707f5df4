"""A process without file descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def few_descriptors(left: int = 0) -> Iterator[None]:
    """This process can open no more than so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not files
    kept = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, used + 20), hard))
        with contextlib.suppress(OSError):
            while True:
                kept.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(kept.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in kept:
            os.close(each)
