"""One table of methods: training, the command line and the documentation know every one of them."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from rmvdb.cli import main as cli
from rmvdb.learning.method import METHODS, Method
from rmvdb.learning.training import OBJECTIVES

PAGE = (Path(__file__).parents[3] / "docs" / "choosing.md").read_text()


def option(command: str, name: str) -> click.Option:
    """Return the option of a command by its name."""
    return next(each for each in cli.main.commands[command].params if isinstance(each, click.Option) and each.name == name)


def test_every_method_is_in_the_table_and_can_be_chosen() -> None:
    assert list(METHODS) == list(Method)
    for command in ("plan", "upgrade"):
        choice = option(command, "method").type
        assert isinstance(choice, click.Choice)
        assert list(choice.choices) == ["auto", *Method]
    assert f"Names from {','.join(Method)}, or all." == option("simulate", "methods").help


@pytest.mark.parametrize("method", Method)
def test_every_method_has_a_row_in_the_documentation(method: Method) -> None:
    assert f"\n| `{method}` |" in PAGE


def test_the_command_and_the_documentation_name_the_methods_that_auto_compares() -> None:
    words = "auto compares naive, identity, procrustes, ridge, centred, neighbours, blend, rqt and rm on the sample"
    assert words in str(option("plan", "method").help)
    named = [f"`{method}`" for method, spec in METHODS.items() if spec.is_candidate]
    assert f"{', '.join(named[:-1])} and {named[-1]}" in PAGE


@pytest.mark.parametrize("method", Method)
def test_a_method_trains_by_a_loss_that_there_is(method: Method) -> None:
    spec = METHODS[method]
    assert spec.loss is None or spec.loss in OBJECTIVES
    assert METHODS[method.headless].loss == spec.loss or method is Method.CL_M  # whose ρ has a term of its own
    assert not METHODS[method.headless].has_head
