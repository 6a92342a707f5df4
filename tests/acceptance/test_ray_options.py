"""What `rmvdb worker --engine ray` refuses before Ray begins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.project import Project

RAY = ("worker", "--engine", "ray")


@pytest.mark.parametrize(
    ("words", "saying"),
    [
        (("worker", "--actors", "2"), "Error: --actors needs --engine ray"),
        (("worker", "--engine", "process", "--num-gpus", "0.5"), "Error: --num-gpus needs --engine ray"),
        (("worker", "--address", "auto"), "Error: --address needs --engine ray"),
        (("worker", "--engine", "dask"), "'dask' is not one of 'process', 'ray'"),
        ((*RAY, "--actors", "0"), "0 is not in the range x>=1"),
        ((*RAY, "--num-gpus", "-1"), "-1.0 is not in the range x>=0"),
        ((*RAY, "--num-gpus", "1.5"), "'1.5' is not a number of GPUs; give a share of one, such as 0.5, or a whole number"),
        ((*RAY, "--num-cpus", "nan"), "'nan' is not a number of processors; give one with at most four digits after the point"),
        ((*RAY, "--num-cpus", "0.00001"), "'0.00001' is not a number of processors"),
        ((*RAY, "--address", "ray://head:10001"), "Error: 'ray://head:10001' is not the address of a node; run this command on"),
        ((*RAY, "--gallery", "thing"), "No gallery is called 'thing'"),
        ((*RAY, "--window", "bad"), "--window 'bad' is not a cron expression"),
    ],
)
def test_an_option_that_cannot_be_is_refused(project: Project, words: tuple[str, ...], saying: str) -> None:
    refused = project.ask(*words, code=2)
    assert saying in refused.stderr
    assert refused.stdout == ""


def test_where_ray_is_not_installed_the_command_says_how_to_install_it(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = project.ask(*RAY, code=2)
    assert refused.stderr == "Error: --engine ray needs ray, which is not installed; run pip install 'rmvdb[ray]'\n"


def test_a_home_that_ray_would_remove_after_the_job_is_refused(tmp_path: Path) -> None:
    """`ray job submit --working-dir .` unpacks a project in such a folder."""
    project = Project(tmp_path / "working_dir_files" / "_ray_pkg_1")
    project.ask("init")
    refused = project.ask(*RAY, code=2)
    assert (
        f"Error: {project.folder}/.rmvdb is in the folder of a job, which Ray removes after it; in rmvdb.toml" in refused.stderr
    )
