"""Commands that refuse."""

from __future__ import annotations

from tests.support.project import Project


def refused(project: Project, *words: str, code: int, saying: str, process: bool = False) -> None:
    """Expect that the command ends with that code and one sentence that says so, without a traceback."""
    done = (project.run if process else project.ask)(*words, code=code)
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, done.stderr
    assert saying in errors[0]
    assert "Traceback" not in done.stderr + done.stdout
