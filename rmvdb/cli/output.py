"""Sentences, tables, progress and questions of the command line, and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click

from rmvdb import errors, timing
from rmvdb.learning.method import Method
from rmvdb.text import counted

if TYPE_CHECKING:
    from rmvdb.planning.plan import Plan
    from rmvdb.upgrade.status import Status


#: A progress bar hides the cursor while it lasts.
SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second ends the process at once, which loses no more than a kill."""
    stop = threading.Event()

    def ask(number: int, _: object) -> None:
        if stop.is_set():
            _end_now("Stopped at once. Run the same command to resume.")
        stop.set()
        with contextlib.suppress(OSError, RuntimeError):  # stderr is closed, or a line is being written
            click.echo("stopping after the batches in hand; once more stops at once", err=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_now(words: str) -> NoReturn:
    """End as a kill would, which loses nothing: threads in the middle of something would be waited for, however long it takes."""
    with contextlib.suppress(OSError, RuntimeError):  # stderr is closed, or a line is being written
        click.echo(f"{SHOW_CURSOR if sys.stderr.isatty() else ''}{words}", err=True)
        sys.stdout.flush()
    os._exit(130)


#: Characters that a terminal obeys or reorders, and characters that cannot be written.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """The text with escape sequences and other control characters written out: ids and reasons are other people's."""
    return _UNSEEN.sub(lambda match: ascii(match[0])[1:-1], text)


def echo(words: str, *, err: bool = False) -> None:
    """Print words for people."""
    click.echo(shown(words), err=err)


def agree(question: str, done: str, command: str) -> None:
    """Ask. Raises NeedsConsent if the answer is no, or if there is no terminal to ask on."""
    try:
        agreed = click.confirm(shown(question))
    except click.Abort:
        click.echo()
        agreed = False
    if not agreed:
        raise errors.NeedsConsent(f"Nothing was {done}; run {command} to agree")


#: Seconds after which a command names the thing it waits for. It repeats that after twice as long each time.
UNTOLD = 2.0


@contextmanager
def told_waits() -> Iterator[None]:
    """Say on stderr, for as long as the block runs, when registry or engine keep it waiting, and for how long."""
    ended, told = threading.Event(), dict[str, float]()

    def watch() -> None:
        while not ended.wait(0.2):
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # stderr is closed
                _say_waits(told)

    watcher = threading.Thread(target=watch, name="rmvdb-waits", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _say_waits(told: dict[str, float]) -> None:
    """`told`: for each thing that is waited for, the seconds of waiting after which the next line comes."""
    longest, now = timing.longer_than(UNTOLD), time.monotonic()
    for what, wait in longest.items():
        waited = now - wait.since
        if waited >= told.get(what, UNTOLD):
            told[what] = 2 * max(waited, UNTOLD)
            echo(f"waiting for {what}: {waited:.0f} s of {wait.patience:g} s", err=True)
    for what in told.keys() - longest.keys():
        del told[what]


def log_to_stdout() -> logging.Logger:
    """The log of a process that stays: its own lines and those of the library, each with time and level."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("rmvdb")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    return log


class Reporter:
    """Progress on stderr: bars on a terminal, else a line when a step begins and at every tenth of it."""

    def __init__(self, progress: Any, *, quiet: bool) -> None:
        self._progress, self._quiet = progress, quiet
        self._tasks: dict[str, Any] = {}
        self._tenths: dict[str, int] = {}

    def __call__(self, step: str, done: int, total: int) -> None:
        """Say how far a step is."""
        if self._quiet or not total:
            return
        if self._progress.console.is_terminal:
            if step not in self._tasks:
                self._tasks[step] = self._progress.add_task(step, total=total)
            self._progress.update(self._tasks[step], completed=done, total=total)
        elif (tenth := done * 10 // total) > self._tenths.get(step, -1):
            self._tenths[step] = tenth
            echo(f"{step}: {done} of {total}", err=True)

    def say(self, words: str) -> None:
        """Say a sentence."""
        if not self._quiet:
            self.show(lambda: echo(words))

    def show(self, write: Callable[[], None]) -> None:
        """Write something between the bars."""
        if self._progress.console.is_terminal:
            self._progress.stop()
            write()
            self._progress.start()
        else:
            write()


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Reporter]:
    """A reporter for as long as the block runs."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        yield Reporter(progress, quiet=quiet)


#: Columns if the output is no terminal, so that no cell is cut short.
_UNBOUNDED = 10_000


def print_json(value: Any) -> None:
    """A value as JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Rows of the same keys, as a table or as JSON."""
    if as_json:
        print_json(rows)
        return
    if not rows:
        echo("none")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console(width=None if sys.stdout.isatty() else _UNBOUNDED).print(table, markup=False)


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case list():
            return shown(", ".join(map(str, value)))
        case dict():
            return shown(", ".join(f"{name}: {each}" for name, each in value.items()))
    return shown(str(value))


def print_plan(found: Plan) -> None:
    """Print a plan: the predicted curve, the measured numbers, the cost."""
    cost, told = found.cost, found.prediction
    echo(f"plan: method {found.method}, order {found.order}, {counted(round(cost['records']), 'record')}")
    if told is not None:
        curve, naive = told["curve"], told["naive"]
        rows = [
            {"t": f"{t:.1f}", "mAP": f"{100 * a:.2f}", "CMC@1": f"{100 * b:.2f}", "naive mAP": f"{100 * c:.2f}"}
            for t, a, b, c in zip(curve["ts"], curve["map"], curve["cmc"], naive["map"], strict=True)
        ]
        print_rows(rows, as_json=False)
        low, high = (100 * bound for bound in told["start"])
        echo(
            f"held out ({_measured(told)}): "
            f"old {100 * told['map_old']:.2f}, new {100 * told['map_new']:.2f} mAP; "
            f"M_0 - M_old in [{low:+.2f}, {high:+.2f}]; gain {_percent(curve['gain'])} (naive {_percent(naive['gain'])}); "
            f"calibration {'on' if told['calibrated'] else 'off'}; {_trained(told)}"
        )
        if told["choice"]:
            echo(f"method: {told['choice']}")
        echo(f"{told['verdict']}: {told['reason']}")
    unknown_duration = "; how long it takes is not known"
    time_needed = f", about {_duration(cost['seconds'])} to embed" if "seconds" in cost else unknown_duration
    copy = f"{_size(cost['copy_bytes'])} of a copy of the old ones, " if "copy_bytes" in cost else ""
    echo(f"cost: {_size(cost['vector_bytes'])} of new vectors, {copy}{_size(cost['archive_bytes'])} of archive{time_needed}")
    if found.skipped:
        echo(f"{counted(found.skipped, 'record')} of the sample could not be embedded; the backfill will quarantine such records")
    _say_unlabelled(found.unlabelled)


def print_comparison(found: dict[str, Any]) -> None:
    """What `Comparison.to_json` gives: each method with its best order, every order of the one to take, and why that one."""
    advice, rows = found["recommended"], found["rows"]
    print_rows([_compared(row) for row in rows if row["best"]], as_json=False)
    if len(orders := [row for row in rows if row["name"] == advice["method"]]) > 1:
        echo(f"every order of {advice['method']}:")
        print_rows([_compared(row) for row in orders], as_json=False)
    searched = "queries" if found["relevance"] == "answers" else "others"
    relevance = {"labels": "records of the same label", "answers": "their known answers", "neighbours": "the new model's nearest"}
    echo(
        f"{counted(found['trained'], 'record')}{_logged(found)} trained on, {found['held_out']} calibrated on; "
        f"{found['evaluated']} {searched} searched for {relevance[found['relevance']]}; "
        "percent, 95 % intervals over these queries; flips: right by the old model, wrong then"
    )
    if found["skipped"]:
        echo(f"{counted(found['skipped'], 'record')} of the sample could not be embedded")
    _say_unlabelled(found["unlabelled"])
    echo(f"recommended: --method {advice['method']} --order {advice['order']}: {advice['choice']}")
    echo(f"{advice['verdict']}: {advice['reason']}")


def _say_unlabelled(count: int) -> None:
    if count:
        what = counted(count, "record of the sample has no label and was", "records of the sample have no label and were")
        echo(f"{what} left out; the backfill moves such records like any other")


def _measured(told: dict[str, Any]) -> str:
    match told["relevance"]:
        case "answers":
            return f"{counted(told['evaluated'], 'query', 'queries')}, their known answers"
        case "labels":
            return f"{counted(told['evaluated'], 'record')}, labels"
    return f"{counted(told['evaluated'], 'record')}, neighbours of the new model"


def _trained(told: dict[str, Any]) -> str:
    if not Method(told["method"]).trains:
        return "nothing is trained"
    return f"{counted(told['trained'], 'record')}{_logged(told)} trained on"


def _logged(found: dict[str, Any]) -> str:
    return f" and {counted(found['logged'], 'logged query', 'logged queries')}" if found["logged"] else ""


def _compared(row: dict[str, Any]) -> dict[str, str | None]:
    curve = row["curve"]
    return {
        "": row["name"] if row["switch"] is None else f"{row['name']} from t={row['switch']:g}",
        "order": row["order"],
        **{f"mAP t={t:g}": _hundred(curve["map"][round(10 * t)]) for t in (0, 0.5, 1)},
        "AUC mAP": f"{_hundred(curve['auc_map'])} ({_hundred(row['auc_map'][0])}–{_hundred(row['auc_map'][1])})",
        "AUC CMC": f"{_hundred(curve['auc_cmc'])} ({_hundred(row['auc_cmc'][0])}–{_hundred(row['auc_cmc'][1])})",
        "CMC@5 t=0": _hundred(curve["cmc5"][0]),
        "recall@10 t=0": _hundred(curve["recall"][0]),
        "gain": _percent(curve["gain"]),
        "fall": _hundred(curve["largest_fall"]),
        "flips": _hundred(max((each for each in row["negative_flips"] if each is not None), default=None)),
        "verdict": row["verdict"],
    }


def print_status(now: Status) -> None:
    """The status of a gallery, for people."""
    echo(
        f"gallery {now.gallery}: epoch {now.epoch}, served from {', '.join(leg['collection'] for leg in now.legs)}, "
        f"{counted(now.clients, 'client')}"
    )
    if now.kept_queries:
        echo(f"queries: {now.kept_queries:,} kept, the oldest {now.oldest_query_days:.1f} days old")
    if now.gone_back:
        echo(f"stopped: {now.gone_back}")
    if now.upgrade is None:
        echo("no upgrade yet")
        return
    what = "roll back" if now.rolls_back else "upgrade"
    echo(f"{what} {now.upgrade}: {now.from_version} → {now.to_version}, {now.method}, {now.order} order")
    echo(f"phase: {now.phase} — {now.doing}")
    if now.phase in ("serving both", "cut over") and now.total:
        speed = f", {now.rate:.0f} records/s" if now.rate else ""
        eta = f", {_duration(now.eta)} left" if now.eta else ""
        far = f"t = {now.t:.3f}: {now.done} of {now.total}{speed}{eta}"
        if not now.listed:
            far = f"{now.done} re-embedded, the rest is not listed yet"
        echo(f"{far}; {now.quarantined} quarantined, {counted(now.writes_open, 'write')} open")
    for each in now.workers or []:
        echo(f"worker: {each}")
    for each in now.silent or []:
        echo(f"worker: {each}")
    if now.held_back:
        echo(f"held back: {now.held_back}")
    if now.stopped:
        echo(f"stopped: {now.stopped}")


def _hundred(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{round(100 * share)} %"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
