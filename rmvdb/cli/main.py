"""The group that holds every command, and what all of them share: options, errors, exit codes."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from rmvdb import __version__, errors
from rmvdb.cli import (
    ending,
    galleries,
    models,
    output,
    planning,
    progress,
    quarantine,
    queries,
    running,
    searching,
    setup,
    upgrading,
)


class Commands(click.Group):
    """A group whose commands end with the message and the exit code of an error of rmvdb."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with progress.name_waits():
                return super().invoke(ctx)
        except errors.RmvdbError as exc:
            with contextlib.suppress(BrokenPipeError):
                output.echo(f"Error: {exc}", err=True)
            ctx.exit(130 if isinstance(exc, errors.Stopped) else exc.exit_code)
        except KeyboardInterrupt:
            with contextlib.suppress(BrokenPipeError):
                output.echo("Stopped", err=True)
            ctx.exit(130)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="rmvdb")
@click.option("--config", type=click.Path(path_type=Path), help="rmvdb.toml or its folder [default: the nearest one upwards].")
@click.option("--trust", is_flag=True, help="Trust a configuration, a home folder or a registry that other users can change.")
@click.option("-v", "--verbose", is_flag=True, help="Print the log, too.")
@click.pass_context
def main(ctx: click.Context, config: Path | None, trust: bool, verbose: bool) -> None:
    """Upgrade the embedding model behind a running vector search, with no downtime.

    \b
    Example:
      rmvdb init
      rmvdb model add v1 --embedder app.models:v1
      rmvdb gallery add photos --model v1 --source "folder:photos/{id}.jpg"
      rmvdb model add v2 --embedder app.models:v2
      rmvdb upgrade --from v1 --to v2
    """
    # torch reads this at its import. If its threads spin while they wait, a training on shared cores takes three times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(output.Lines("%(asctime)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, handlers=[handler])
    ctx.obj = config  # a command that opens it decides whether to trust it


for command in (
    setup.init,
    setup.doctor,
    setup.db,
    setup.registry,
    models.model,
    galleries.gallery,
    planning.simulate,
    planning.plan,
    upgrading.upgrade,
    running.pause,
    running.resume,
    running.throttle,
    running.status,
    running.history,
    running.worker,
    ending.verify,
    ending.cutover,
    ending.cleanup,
    ending.gc,
    ending.rollback,
    quarantine.quarantine,
    queries.queries,
    searching.search,
):
    main.add_command(command)
