"""A function in a process of its own: where gRPC has been used, as by other tests in this process, a fork may wait for ever."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable


def run_spawned(target: Callable[..., None], *arguments: object, seconds: float) -> None:
    """Run it there to its end. Raise AssertionError if it fails or takes longer."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    process.join(seconds)
    try:
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
