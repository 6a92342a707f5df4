"""Tests that `make test` leaves to `make long`: each file or folder takes minutes of a run.

Shorter tests check the same promises in one process. CI runs both commands.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

#: Such tests, by folder, file or name, and why they take so long.
LONG = {
    "tests/acceptance/test_bad_files.py": "upgrades with files altered or a disk full",
    "tests/acceptance/test_compatible_losses.py": "trains each loss",
    "tests/acceptance/test_curves.py": "five upgrades that train",
    "tests/acceptance/test_examples.py": "programs with upgrades",
    "tests/acceptance/test_hyperbolic.py": "trains models of the user's",
    "tests/acceptance/test_lift.py": "whole upgrades",
    "tests/acceptance/test_lite3.py": "another engine, from the first command to the last",
    "tests/acceptance/test_no_shared_disk.py": "an upgrade there and back on servers",
    "tests/acceptance/test_other_homes.py": "whole upgrades",
    "tests/acceptance/test_outages.py": "a server or a database stops in each phase of an upgrade",
    "tests/acceptance/test_own_writes.py": "a server whose clock is waited for",
    "tests/acceptance/test_query_log.py": "plans that train",
    "tests/acceptance/test_ray.py": "nodes of Ray start, and die in the middle of an upgrade",
    "tests/acceptance/test_rebuild.py": "a registry is lost in each phase of an upgrade",
    "tests/acceptance/test_schedule.py": "whole upgrades",
    "tests/acceptance/test_secrets.py": "each command on servers",
    "tests/acceptance/test_servers.py": "whole upgrades on servers",
    "tests/acceptance/test_simulate.py": "trains each method",
    "tests/acceptance/test_speed.py": "each row of the benchmark once, small",
    "tests/acceptance/test_suspension.py": "processes stand still for longer than a lease",
    "tests/acceptance/test_third_version.py": "two upgrades each",
    "tests/acceptance/test_upgrade.py::test_a_model_that_is_declared_compatible_is_upgraded_to_without_training": "upgrades",
    "tests/acceptance/test_upgrade.py::test_a_query_is_embedded_once_and_twice_only_by_naive": "upgrades",
    "tests/acceptance/test_upgrade.py::test_other_metrics_and_a_change_of_metric_are_upgraded_too": "upgrades",
    "tests/acceptance/test_useless_labels.py": "plans that train, and upgrades",
    "tests/contract/test_settle.py": "thousands of rows, flushed and indexed",
    "tests/docs/test_pages_run.py": "each block of each page",
    "tests/integration/crash_points": "a process dies at each call, and leases run out",
    "tests/integration/instant_rollback": "upgrades there and back",
    "tests/integration/test_engine_deaths.py": "engines die and start again",
    "tests/integration/test_hangs.py": "databases stand still",
    "tests/integration/test_many_clients.py": "two hundred clients",
    "tests/integration/test_moments.py": "registries and engines go back",
    "tests/integration/test_rebuild_points.py": "a registry is lost at each point",
    "tests/integration/test_throttle.py::test_a_slow_embedder_or_store_holds_up_the_work_not_the_memory": "waits for slow parts",
    "tests/integration/third_version": "two upgrades each",
    "tests/model": "every state of the protocol",
}


def is_long(test: str) -> bool:
    """Return whether a test, by its node id, is one of these, or stands in one of these places."""
    name = test.partition("[")[0]
    return any(f"{name}{end}".startswith(f"{place}{end}") for place in LONG for end in ("/", "::"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """If the run leaves them out, do not import whole files of them: each process would, for seconds."""
    left_out = "not long" in config.getoption("markexpr")
    return True if left_out and os.path.relpath(collection_path, config.rootpath) in LONG else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Mark them, before pytest chooses by marks."""
    for item in items:
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.long)
