"""One table of kinds: the command line offers every one, and each has the probes that a model must take."""

from __future__ import annotations

import click
import pytest

from rmvdb.cli import main as cli
from rmvdb.items.kinds import KINDS, REQUIRED, Kind


def test_every_kind_can_be_chosen() -> None:
    group = cli.main.commands["model"]
    assert isinstance(group, click.Group)
    choice = next(each.type for each in group.commands["add"].params if each.name == "kind")
    assert isinstance(choice, click.Choice)
    assert list(choice.choices) == list(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_probes(kind: Kind) -> None:
    assert len(KINDS[kind].probes()) == REQUIRED
    assert KINDS[kind].more()
