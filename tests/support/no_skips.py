"""In continuous integration (CI=true) a skipped test is a failed run: there, everything that tests need is there."""

from __future__ import annotations

import os

import pytest


def _counts() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


def _skipped(session: pytest.Session) -> list[pytest.TestReport]:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    return list(reporter.stats.get("skipped", [])) if reporter else []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run that would pass if a test was skipped."""
    if _counts() and exitstatus == pytest.ExitCode.OK and _skipped(session):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why the run failed; the skipped tests and their reasons stand above (-ra)."""
    if _counts() and (skipped := terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(f"CI=true: {len(skipped)} skipped tests count as failures", red=True)
