"""How test processes share the tests: a file at a time, or a test at a time if each test makes all it needs.

A file's fixtures are made once, by the process that has the file. A few files take minutes, and the run would end with one
process at each of them. Their tests share nothing that is dear, so any process takes the next.

`--minutes` bounds a run by time, for CI on a slow machine: after so many minutes no process begins another file. `--seed`
shuffles the files, so that runs of different seeds leave out different ones. The run says how many tests it left out.
"""

from __future__ import annotations

import random
import time

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

#: Files, and folders of them, whose tests share nothing that takes long to make.
BY_TEST = {
    "tests/acceptance/test_interruptions.py",  # a copy of the session's gallery for each
    "tests/acceptance/test_outages.py",  # a server, or a database, of its own for each
    "tests/acceptance/test_roll_back.py",  # a copy of the session's gallery for each
    "tests/acceptance/test_upgrade.py",  # a copy of the session's gallery for each
    "tests/acceptance/test_workers.py",  # a copy of the session's gallery for each
    "tests/integration/faults",  # a gallery in the test's own process for each
    "tests/integration/test_hangs.py",  # a database of its own for each
}

#: The tests that a run by time did not begin.
LEFT_OUT = pytest.StashKey[list[str]]()


def unit(test: str) -> str:
    """Return the name of the tests that one process runs together with this one: its file, or the test itself."""
    file = test.split("::", 1)[0]
    return test if {file, file.rpartition("/")[0]} & BY_TEST else file


class Spread(LoadFileScheduling):
    """`--dist loadfile`, but tests of the files in BY_TEST are given out one by one, and none after `--minutes`."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        minutes = config.getoption("minutes")
        self.ends = None if minutes is None else time.monotonic() + 60 * minutes

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        if self.ends is not None and time.monotonic() > self.ends and self.workqueue:
            self.config.stash[LEFT_OUT].extend(test for tests in self.workqueue.values() for test in tests)
            self.workqueue.clear()
        super()._reschedule(node)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("spread", "how long, and in which order")
    group.addoption("--minutes", type=float, help="begin no further file after so many minutes (with -n)")
    group.addoption("--seed", help="shuffle the files by this text")


def pytest_configure(config: pytest.Config) -> None:
    """Begin the list of the tests that the time leaves out."""
    config.stash[LEFT_OUT] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the files by the seed; each process does, and all have one order."""
    seed = config.getoption("seed")
    if seed is not None:
        files = sorted({item.path for item in items})
        random.Random(seed).shuffle(files)
        places = {file: place for place, file in enumerate(files)}
        items.sort(key=lambda item: places[item.path])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests the time left out."""
    if left_out := config.stash[LEFT_OUT]:
        minutes = config.getoption("minutes")
        terminalreporter.write_line(f"{len(left_out)} tests did not begin in {minutes:g} minutes", yellow=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Give the scheduler of `--dist loadfile`; any other is xdist's own."""
    return Spread(config, log) if config.getoption("dist") == "loadfile" else None
