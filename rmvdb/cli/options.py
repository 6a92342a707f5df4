"""Options that several commands take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rmvdb.planning.plan import Question

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

METHODS = ("naive", "identity", "rqt", "cl-s", "cl-m", "mcl", "rm", "fct")
AUTO = "auto"
ORDERS = ("classification-score", "centroid", "uncertainty", "cluster", "random", "traffic")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
gallery_option = click.option("--gallery", "-g", help="Which gallery; may be left out where there is one.")
missing_option = click.option("--accept-missing", is_flag=True, help="Agree that records which are gone were deleted.")
force_option = click.option(
    "--force",
    is_flag=True,
    help="Do not wait for clients that cannot serve the next plan: their searches fail from then on. It names them.",
)


def _together(*options: Decorator) -> Decorator:
    """A decorator that gives a command these options, in their order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def sample_options(most: int) -> Decorator:
    """What a plan and a simulation are asked alike, with so many records sampled by default."""
    return _together(
        gallery_option,
        click.option("--from", "from_version", required=True, help="The model version the gallery holds."),
        click.option("--to", "to_version", required=True, help="The model version it shall hold."),
        click.option("--labels", metavar="FIELD", help="The field with a record's class or identity, if it has one."),
        click.option(
            "--sample", type=click.IntRange(min=1), default=most, show_default=True, help="Records to train and measure on."
        ),
        click.option(
            "--side", metavar="FIELD", help="The field with a list of numbers that helps the method fct, if there is one."
        ),
        click.option(
            "--queries",
            metavar="FILE",
            help='Queries, a line each: {"item": "a text", "answers": [7, 42]} to choose and measure by; those without answers '
            "ψ is trained on, too.",
        ),
        click.option("--paper", is_flag=True, help="Train with the paper's settings as printed, and calibrate nothing."),
        click.option("--seed", type=int, default=0, show_default=True, help="Of the sample, the split and the training."),
    )


plan_options = _together(
    sample_options(20_000),
    click.option(
        "--method",
        type=click.Choice((AUTO, *METHODS)),
        default=AUTO,
        show_default=True,
        help="How the old part is searched; auto compares naive, identity, rqt and rm on the sample.",
    ),
    click.option(
        "--order", type=click.Choice(ORDERS), help="What is backfilled first [default: the first the version can give]."
    ),
    click.option(
        "--instant-rollback",
        is_flag=True,
        help="Empty a copy and keep the original current, so that rmvdb rollback takes a moment.",
    ),
    click.option("--tune", is_flag=True, help="Train with a few other settings, too, and take those that are worth most."),
    click.option("--again", is_flag=True, help="Make the plan anew, even if one is kept."),
)


def make_question(gallery: str, options: dict[str, Any], *, method: str = AUTO) -> Question:
    """What is asked of a plan or a simulation by the options they share."""
    from rmvdb.learning.method import Method
    from rmvdb.planning.plan import Question

    return Question(gallery=gallery, method=None if method == AUTO else Method(method), **options)
