"""Options that several commands take."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from rmvdb import errors
from rmvdb.cli import output
from rmvdb.learning.method import METHODS, Method
from rmvdb.planning.objective import Objective
from rmvdb.planning.orders.table import ORDERS

if TYPE_CHECKING:
    from rmvdb.planning.question import Question

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

AUTO = "auto"
#: The methods that auto compares, in words.
CANDIDATES = " and ".join(", ".join(method for method, spec in METHODS.items() if spec.is_candidate).rsplit(", ", 1))

json_option = click.option("--json", "as_json", is_flag=True, callback=output.only_json, help="Print JSON.")
gallery_option = click.option("--gallery", "-g", help="Which gallery. You can leave it out if there is only one.")
missing_option = click.option("--accept-missing", is_flag=True, help="Accept that the missing records were deleted.")
force_option = click.option(
    "--force",
    is_flag=True,
    help="Do not wait for clients that cannot serve the next plan. Their searches fail from then on. The command names them.",
)


def _count(_ctx: click.Context, _param: click.Parameter, value: str) -> int | None:
    """Read a number of candidates. `auto` is None."""
    if value == AUTO:
        return None
    if not value.isdecimal():
        raise errors.UsageError(f"--rescore is auto, 0 or a number of candidates, not {value!r}")
    return int(value)


class Finite(click.FloatRange):
    """A finite number: click lets nan and infinity pass."""

    refusal = "is not a finite number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} {self.refusal}", param, ctx)
        return number


def _together(*options: Decorator) -> Decorator:
    """Return a decorator that gives a command these options, in this order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def sample_options(most: int) -> Decorator:
    """Return the options that a plan and a simulation share. `most` is the default size of the sample."""
    return _together(
        gallery_option,
        click.option("--from", "from_version", required=True, help="The model version that the gallery holds."),
        click.option("--to", "to_version", required=True, help="The model version that the gallery will hold."),
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
            help='A file with one query a line: {"item": "a text", "answers": [7, 42]}. Queries with answers choose and measure. '
            "Queries without answers train ψ, too.",
        ),
        click.option(
            "--for",
            "objective",
            type=click.Choice(list(map(str, Objective))),
            help="The metric to choose by [default: nDCG@10 if --queries have answers, else mAP].",
        ),
        click.option(
            "--rescore",
            metavar="auto|0|K",
            default=AUTO,
            show_default=True,
            callback=_count,
            help="How many hits of the old collection each search embeds by the new model. auto measures what that is worth.",
        ),
        click.option(
            "--minutes",
            type=Finite(min=0.1),
            default=2.0,
            show_default=True,
            help="About how long the plan may take. Its embeddings are kept for the next plan and for the backfill.",
        ),
        click.option(
            "--paper", is_flag=True, help="Train with the paper's settings as printed. Calibrate only if the metrics differ."
        ),
        click.option(
            "--seed",
            type=click.IntRange(0, 2**31 - 1),
            default=0,
            show_default=True,
            help="The seed of sample, split and training.",
        ),
    )


plan_options = _together(
    sample_options(20_000),
    click.option(
        "--method",
        type=click.Choice((AUTO, *map(str, METHODS))),
        default=AUTO,
        show_default=True,
        help=f"How to search the old part. auto compares {CANDIDATES} on the sample.",
    ),
    click.option(
        "--order",
        type=click.Choice(list(ORDERS)),
        help="Which records move first [default: the order that is worth most on the sample].",
    ),
    click.option(
        "--instant-rollback",
        is_flag=True,
        help="Move records out of a copy and keep the original current. Then rmvdb rollback takes a moment.",
    ),
    click.option("--again", is_flag=True, help="Make a new plan, even if there is one for this question."),
)


def make_question(gallery: str, options: dict[str, Any], *, method: str = AUTO) -> Question:
    """Return the question that the shared options of a plan and a simulation ask."""
    from rmvdb.planning.question import Question

    objective = options["objective"] and Objective(options["objective"])
    return Question(gallery=gallery, method=None if method == AUTO else Method(method), **options | {"objective": objective})
