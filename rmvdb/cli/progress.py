"""The output of a command while it runs: progress bars, waits, the log of a worker. Ctrl-C stops it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rmvdb import timing
from rmvdb.cli.output import Lines, echo

#: Shows the cursor again: a progress bar hides it.
SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Give an event that the first Ctrl-C or SIGTERM sets. The second ends the process at once, which loses no more than a
    kill."""
    stop, asked = threading.Event(), list[int]()

    def ask(number: int, _: object) -> None:
        if asked:
            _end_now("Stopped at once. Run the same command to resume.")
        asked.append(number)
        # In another thread: this one may hold the event's lock just now, in a wait that the signal interrupts.
        threading.Thread(target=stop.set, name="rmvdb-stop", daemon=True).start()
        with contextlib.suppress(OSError, RuntimeError):  # stderr is closed, or a line is being written
            echo("stopping after the batches in hand; once more stops at once", err=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_now(words: str) -> NoReturn:
    """End as a kill does, which loses nothing. An ordinary exit waits for running threads, however long they take."""
    with contextlib.suppress(OSError, RuntimeError):  # stderr is closed, or a line is being written
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)
        echo(words, err=True)
        sys.stdout.flush()
    os._exit(130)


#: Seconds after which a command names the thing it waits for. It repeats that after twice as long each time.
SILENT = 2.0


@contextmanager
def name_waits() -> Iterator[None]:
    """Say on stderr, while the block runs, if it waits for the registry or the engine, and for how long."""
    ended, next_lines = threading.Event(), dict[str, float]()

    def watch() -> None:
        while not ended.wait(0.2):
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # stderr is closed
                _say_waits(next_lines)

    watcher = threading.Thread(target=watch, name="rmvdb-waits", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _say_waits(next_lines: dict[str, float]) -> None:
    """Say what is waited for. `next_lines` holds, for each thing, the seconds of waiting after which its next line comes."""
    longest, now = timing.longer_than(SILENT), time.monotonic()
    for what, wait in longest.items():
        waited = now - wait.since
        if waited >= next_lines.get(what, SILENT):
            next_lines[what] = 2 * max(waited, SILENT)
            echo(f"waiting for {what}: {waited:.0f} s of {wait.patience:g} s", err=True)
    for what in next_lines.keys() - longest.keys():
        del next_lines[what]


def log_to_stdout() -> logging.Logger:
    """Print the log of a worker on stdout: its own lines and the library's, each with time and level."""
    handler = _LogHandler(sys.stdout)
    handler.setFormatter(Lines("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("rmvdb")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    return log


class _LogHandler(logging.StreamHandler[Any]):
    """Writes log lines. If no program reads them any more, the work goes on."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Say nothing of a closed pipe."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)


def _tell(words: str, *, err: bool) -> None:
    """Print words. If no program reads them any more (`| head`), the work goes on."""
    with contextlib.suppress(BrokenPipeError):
        echo(words, err=err)


class Reporter:
    """Shows progress on stderr: bars on a terminal, else a line when a step begins and at every tenth of it."""

    def __init__(self, progress: Any, *, quiet: bool, err: bool = False) -> None:
        self._progress, self._quiet, self._err = progress, quiet, err
        self._tasks: dict[str, Any] = {}
        self._tenths: dict[str, int] = {}

    def __call__(self, step: str, done: int, total: int) -> None:
        """Say how far a step is."""
        if self._quiet or not total:
            return
        if self._progress.console.is_terminal:
            if step not in self._tasks:
                self._tasks[step] = self._progress.add_task(step, total=total)
            self._progress.update(self._tasks[step], completed=done, total=total)
        elif (tenth := done * 10 // total) != self._tenths.get(step, -1):
            self._tenths[step] = tenth
            _tell(f"{step}: {done} of {total}", err=True)

    def say(self, words: str) -> None:
        """Say a sentence."""
        if not self._quiet:
            self.show(lambda: _tell(words, err=self._err))

    def announce(self, words: str) -> None:
        """Say on stderr what a step waits for."""
        if not self._quiet:
            self.show(lambda: _tell(words, err=True))

    def show(self, write: Callable[[], None]) -> None:
        """Write something between the bars."""
        if self._progress.console.is_terminal:
            self._progress.stop()
            write()
            self._progress.start()
        else:
            write()


@contextmanager
def reporting(*, quiet: bool = False, err: bool = False) -> Iterator[Reporter]:
    """Give a reporter while the block runs. With `err` it says its sentences on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        yield Reporter(bars, quiet=quiet, err=err)
