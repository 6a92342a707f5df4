"""python -m examples.paper_tables: makes one table."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from examples.paper_tables import report, scales
from examples.paper_tables.backfill import Upgrade
from examples.paper_tables.models import Say, Workshop
from examples.paper_tables.scales import Scale
from examples.paper_tables.settings import SETTINGS
from examples.paper_tables.tasks import Task
from rmvdb.errors import RmvdbError

SEEDS = 3


def make(
    setting: str, *, folder: Path, out: Path, device: torch.device, seeds: int, scale: Scale | None = None, say: Say = print
) -> dict[str, Any]:
    """Train what is missing, measure every row, and write the table; without a scale the one that suits the device."""
    chosen = SETTINGS[setting]
    scale = scale or scales.chosen(device, wider=chosen.wider)
    made_by = {"scale": scale.name, "backbones": sorted(set(scale.backbones)), "device": _called(device)}
    report.check(out / f"{setting}.json", made_by)
    task = chosen.split(chosen.read(folder), scale.sizes, kept=chosen.kept)
    workshop = Workshop(task, out / "embeddings", device=device, say=say)
    recipes = scale.recipes() if not task.steps else scale.sequence(len(task.steps))
    upgrade = Upgrade(task=task, workshop=workshop, recipes=recipes, seeds=range(seeds), say=say)
    began = time.perf_counter()
    rows = list(chosen.rows(upgrade, scale.settings))
    measuring = time.perf_counter() - began - workshop.training
    found = {
        "setting": setting,
        "about": chosen.about,
        **made_by,
        "threads": workshop.threads,
        "epochs": scale.epochs,
        "weights": workshop.weights,
        "seeds": max(row.get("seeds", 1) for row in rows),
        "seconds": round(workshop.seconds + measuring, 1),
        "pictures": _counts(task),
        "rows": rows,
        "embeddings": workshop.files,
    }
    report.write(found, out)
    return found


def _counts(task: Task) -> dict[str, int]:
    parts = {"for the old model": task.old, "for the new one": task.new, "for ψ, ρ, h and calibrations": task.pairs}
    return {name: len(part) for name, part in {**parts, "searched": task.gallery}.items() if len(part)}


def _called(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _device(_: click.Context, __: click.Parameter, value: str) -> torch.device:
    """The device of that name; `auto` is a GPU where there is one."""
    if value == "auto":
        value = "cuda" if torch.cuda.is_available() else "cpu"
    if value.startswith("cuda") and not torch.cuda.is_available():
        raise click.BadParameter("there is no GPU that torch can use; choose cpu")
    return torch.device(value)


EXAMPLE = "python -m examples.paper_tables cifar100-extended-class --data ~/images"


@click.command(epilog=f"Example: {EXAMPLE}")
@click.argument("setting", type=click.Choice(list(SETTINGS)))
@click.option(
    "--data", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="The data set."
)
@click.option("--device", default="auto", show_default=True, callback=_device, help="cpu, cuda or auto.")
@click.option("--seeds", type=click.IntRange(1), help=f"Trainings of ψ, ρ and h that a row is the mean of.  [default: {SEEDS}]")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("results"), show_default=True, help="For the table."
)
@click.option(
    "--epochs", type=click.IntRange(1), help="Of every model, in place of the scale's own; under 60 is never of full scale."
)
@click.option("--pairs", type=click.IntRange(60), help="Kept pictures for ψ, ρ and h, in place of the scale's own number.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: torch's own]")
def main(
    setting: str,
    folder: Path,
    device: torch.device,
    seeds: int | None,
    out: Path,
    epochs: int | None,
    pairs: int | None,
    threads: int | None,
) -> None:
    """Train the models of a table on your copy of the data set, and write OUT/SETTING.json and .md.

    With a GPU ResNets learn for 60 epochs from every picture (scale `full`); without one a small network learns from a part of
    them (`small`). Weights and embeddings are kept in OUT/embeddings with their checksums: the same command goes on from there,
    and makes again what is missing or was altered. --data is a folder with load.py for CIFAR-100 and Omniglot, and the
    published layout of Market-1501 and TinyImageNet.
    """
    if (seeds or pairs) and not SETTINGS[setting].kept:
        raise click.UsageError(f"{setting} trains no ψ, ρ or h; leave --seeds and --pairs out")
    if threads:
        torch.set_num_threads(threads)
    scale = scales.chosen(device, wider=SETTINGS[setting].wider)
    scale = replace(scale, epochs=epochs or scale.epochs, sizes=replace(scale.sizes, paired=pairs or scale.sizes.paired))
    try:
        found = make(
            setting,
            folder=folder,
            out=out,
            device=device,
            seeds=seeds or SEEDS,
            scale=scale,
            say=lambda sentence: click.echo(sentence, err=True),
        )
    except RmvdbError as exc:
        click.echo(f"Error: {exc}", err=True)
        raise SystemExit(exc.exit_code) from exc
    click.echo(report.markdown(found))


if __name__ == "__main__":
    main()
