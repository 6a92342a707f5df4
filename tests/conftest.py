"""The fixtures and settings of all tests."""

import faulthandler
import os
from collections.abc import Iterator

import hypothesis
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from tests.support.scratch import prefer_memory

# Before anything loads OpenMP. Two test processes with a pool for every core each would mostly wait for one another, spinning:
# beside another load the trainings took eight times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.support.fixtures", "tests.support.postgres", "tests.support.data", "tests.support.no_skips"]
pytest_plugins += ["tests.support.s3", "tests.support.spread", "tests.support.long_tests"]

prefer_memory()

# How long an example takes is the machine's; otherwise as Hypothesis has it, which is repeatable where CI is set.
_EXAMPLES = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("rmvdb", hypothesis.settings.default, **_EXAMPLES)
hypothesis.settings.load_profile("rmvdb")

#: Seconds that a test's fixtures may take to end.
END = 300.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Limit the teardown: once a test has failed, pytest's own limits are off, and its leftovers might never end."""
    faulthandler.dump_traceback_later(END, exit=True, file=item.config.stash.get(fault_handler_stderr_fd_key, 2))
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
