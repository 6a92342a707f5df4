"""How test processes share the tests: a file at a time, or a test at a time if each test makes all it needs.

A file's fixtures are made once, by the process that has the file. A few files take minutes, and the run would end with one
process at each of them. Their tests share nothing that is dear, so any process takes the next.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

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


def unit(test: str) -> str:
    """Return the name of the tests that one process runs together with this one: its file, or the test itself."""
    file = test.split("::", 1)[0]
    return test if {file, file.rpartition("/")[0]} & BY_TEST else file


class Spread(LoadFileScheduling):
    """`--dist loadfile`, but tests of the files in BY_TEST are given out one by one."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Give the scheduler of `--dist loadfile`; any other is xdist's own."""
    return Spread(config, log) if config.getoption("dist") == "loadfile" else None
