"""Tests that `make test` leaves to `make long`: each file or folder takes minutes of a run.

Shorter tests check the same promises in one process. CI runs both commands.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

#: Places of such tests, and why they take so long.
LONG = {
    "tests/acceptance/test_curves.py": "five upgrades that train",
    "tests/acceptance/test_hyperbolic.py": "trains models of the user's",
    "tests/acceptance/test_lite3.py": "another engine, from the first command to the last",
    "tests/acceptance/test_outages.py": "a server or a database stops in each phase of an upgrade",
    "tests/acceptance/test_own_writes.py": "a server whose clock is waited for",
    "tests/acceptance/test_query_log.py": "plans that train",
    "tests/acceptance/test_rebuild.py": "a registry is lost in each phase of an upgrade",
    "tests/acceptance/test_servers.py": "whole upgrades on servers",
    "tests/acceptance/test_suspension.py": "processes stand still for longer than a lease",
    "tests/acceptance/test_third_version.py": "two upgrades each",
    "tests/acceptance/test_useless_labels.py": "plans that train, and upgrades",
    "tests/contract/test_settle.py": "thousands of rows, flushed and indexed",
    "tests/integration/crash_points": "a process dies at each call, and leases run out",
    "tests/integration/instant_rollback": "upgrades there and back",
    "tests/integration/test_engine_deaths.py": "engines die and start again",
    "tests/integration/test_hangs.py": "databases stand still",
    "tests/integration/test_moments.py": "registries and engines go back",
    "tests/integration/third_version": "two upgrades each",
    "tests/model": "every state of the protocol",
}


def is_long(test: str) -> bool:
    """Return whether a test, by its node id, stands in one of these places."""
    file = test.split("::", 1)[0]
    return any(file == place or file.startswith(f"{place}/") for place in LONG)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Mark them, before pytest chooses by marks."""
    for item in items:
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.long)
