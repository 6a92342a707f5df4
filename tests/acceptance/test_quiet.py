"""Warnings of other packages stay off the terminal of commands and applications, whose own filters do not change."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.support.project import Project

#: A Python in which these packages warn when they are imported, as some of their releases do.
NOISY = """
import sys
import warnings


class Noisy:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("pymilvus", "faiss"):
            warnings.warn(f"{name} is noisy", UserWarning, stacklevel=2)


sys.meta_path.insert(0, Noisy)
before = list(warnings.filters)
"""
COMMAND = """
from rmvdb.cli import main as cli

cli.main(sys.argv[1:], prog_name="rmvdb", standalone_mode=False)
"""
APPLICATION = """
import rmvdb

with rmvdb.connect() as client:
    print(client.search("a text", limit=1))
assert [each for each in warnings.filters if each in before] == before  # other packages add some of their own
"""


def run(project: Project, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Return a fresh process with Python's own warning filters."""
    environment = {name: value for name, value in project.environment.items() if name != "PYTHONWARNINGS"}
    return subprocess.run(
        [sys.executable, "-c", NOISY + program, *words],
        cwd=project.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )


def said(project: Project, program: str, *words: str) -> str:
    """Return its output on stderr."""
    return run(project, program, *words).stderr


@pytest.mark.parametrize("program", ["", "import rmvdb.learning.training", "import rmvdb.planning.orders, rmvdb.engines.milvus"])
def test_an_import_says_nothing(project: Project, program: str) -> None:
    assert said(project, program) == ""


def test_an_application_says_nothing_and_keeps_its_filters(project: Project) -> None:
    assert said(project, APPLICATION) == ""


@pytest.mark.parametrize("words", ["doctor", "gallery show", "search words", "status"])
def test_a_command_says_nothing_of_other_packages(project: Project, words: str) -> None:
    assert said(project, COMMAND, *words.split()) == ""


def test_progress_goes_to_stderr_and_results_to_stdout(project: Project) -> None:
    done = run(project, COMMAND, "plan", "--from", "v1", "--to", "v2", "--method", "naive", "--order", "cluster")
    progress = re.compile(r"[\w ]+: \d+ of \d+")
    assert done.stderr
    assert all(progress.fullmatch(line) for line in done.stderr.splitlines()), done.stderr
    assert not [line for line in done.stdout.splitlines() if progress.fullmatch(line)]
    assert done.stdout.startswith("plan: method naive")


def test_with_json_stdout_holds_json_alone_though_a_users_module_prints(project: Project) -> None:
    models = project.folder / "models.py"
    models.write_text(f"print('loading the weights')\n{models.read_text()}")
    for command in (("search", "a text"), ("doctor",)):
        done = run(project, COMMAND, *command, "--json")
        assert json.loads(done.stdout)
        assert "loading the weights" in done.stderr
