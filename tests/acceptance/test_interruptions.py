"""Ctrl-C and kill -9, by the real command: the same command goes on where the upgrade stopped."""

from __future__ import annotations

import signal

import pytest

from tests.acceptance.conftest import IDS, NAIVE, UPGRADE
from tests.support.application import searching
from tests.support.project import Project
from tests.support.waiting import wait_for_processes


def test_ctrl_c_stops_and_the_same_command_goes_on(project: Project) -> None:
    project.fault(v2={"slow": 0.06})
    first = project.start(*NAIVE, "--sample", "80")
    wait_for_processes(lambda: project.json("status")["done"] > 0)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "Stopped. Run the same command to resume." in err
    assert 0 < project.json("status")["t"] < 1
    assert project.json("status")["workers"] == []
    with searching(project, IDS) as watch:
        project.run(*NAIVE)
    assert watch.trouble == []
    assert project.json("status")["phase"] == "cut over"


def test_ctrl_c_while_it_plans_stops_it_and_nothing_is_registered(project: Project) -> None:
    project.fault(v2={"slow": 0.06})
    begun = project.calls("v2")
    process = project.start(*UPGRADE)
    wait_for_processes(lambda: project.calls("v2") != begun)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Stopped. Run the same command to resume." in err
    assert project.json("status")["upgrade"] is None
    assert len(project.calls("v2")) < len(IDS)


@pytest.mark.parametrize("command", [(*NAIVE, "--sample", "80"), ("worker",)])
def test_ctrl_c_twice_stops_at_once(project: Project, command: tuple[str, ...]) -> None:
    """A batch that is being embedded for half a minute is not waited for."""
    project.ask(*NAIVE, "--sample", "80", "--detach")
    project.fault(v2={"slow": 1.5})
    begun = project.calls("v2")
    process = project.start(*command)
    try:
        wait_for_processes(lambda: project.calls("v2") != begun)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("once more stops at once" in line for line in process.stderr)  # two that come together are one
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.strip().endswith("Stopped at once. Run the same command to resume.")


def test_a_killed_upgrade_run_again_ends_in_the_same_state(project: Project) -> None:
    project.fault(v2={"slow": 0.02})
    with searching(project, IDS) as watch:
        for share in (0.1, 0.4):
            first = project.start(*NAIVE, "--sample", "80")
            wait_for_processes(lambda share=share: project.json("status")["t"] > share)
            first.kill()
            first.communicate()
        project.run(*NAIVE)
    assert watch.trouble == []
    assert project.json("verify")["ok"]
    assert sorted(project.collections().values()) == [0, 400]
