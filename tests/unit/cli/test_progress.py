"""Signals and closed pipes while a command works."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import pytest

from rmvdb.cli import progress


def test_a_signal_while_the_main_thread_waits_for_the_event_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[str]()
    monkeypatch.setattr(progress, "_end_now", ended.append)
    with progress.stoppable() as stop:
        with stop._cond:  # as in the middle of a wait
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            assert ended
        assert stop.wait(10.0)


class Closed:
    """A pipe that nobody reads."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_work_goes_on_though_nobody_reads_its_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = capsys
    with progress.reporting() as report, monkeypatch.context() as patched:
        patched.setattr(progress, "echo", lambda *_, **__: Closed().write(""))
        report.say("a sentence")
        report.announce("a wait")
        report("a step", 1, 10)
    handler: Any = progress._LogHandler(Closed())  # type: ignore[arg-type]
    handler.emit(logging.LogRecord("rmvdb", logging.INFO, "", 0, "a line", None, None))
    assert "Logging error" not in said.readouterr().err
