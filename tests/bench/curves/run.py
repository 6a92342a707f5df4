"""One upgrade of one case, from `rmvdb init` to the cut-over, searched through `rmvdb.connect` at each t."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rmvdb
from rmvdb.app import wiring
from rmvdb.cli.main import main as rmvdb_command
from rmvdb.cli.upgrading import upgrade as upgrade_command
from tests.bench.curves import memo
from tests.bench.curves.cases import Case
from tests.bench.curves.measure import area, largest_fall, quality

#: The t of the upgrade before, when a third generation comes.
UNFINISHED = 0.4
#: Searches that are timed, one by one, each with its own embedding.
TIMED_SEARCHES = 11
#: Queries of one call at most, and hits: a call that asks for more takes long on a busy machine.
TOGETHER, HITS = 16, 4000
#: Short waits between epochs, as nothing but this process searches. All candidates are re-scored, however long that takes:
#: the times say how long.
SETTINGS = {"plan_max_age": 0.2, "longest_search": 8.0, "rescore_ms": 60_000}
GALLERY = "g"
#: Records of one write.
WRITTEN = 50


@dataclass(frozen=True, kw_only=True)
class Way:
    """How an upgrade is asked for: the method, what is re-scored, whether it has a log of other queries, the field of labels."""

    method: str = "auto"
    rescore: int | None = None
    log: bool = False
    labels: str = ""

    @property
    def options(self) -> list[str]:
        """Return the options of `rmvdb plan` and `rmvdb upgrade`. A named method is compared in random order."""
        named = [] if self.method == "auto" else ["--method", self.method, "--order", "random"]
        again = [] if self.rescore is None or not can_rescore() else ["--rescore", str(self.rescore)]
        labels = ["--labels", self.labels] if self.labels else []
        return [*named, *again, *labels, *(["--queries", "log.jsonl"] if self.log else [])]


class Failed(Exception):
    """A command of rmvdb ended with an error; the message is what it printed last."""


#: The beginning of the message if rmvdb refused the method: that is a result.
REFUSED = "refused: "


def can_rescore() -> bool:
    """Return whether this rmvdb re-scores."""
    return "rescore" in inspect.signature(rmvdb.Client.search).parameters


@dataclass(frozen=True)
class Ends:
    """The answers of galleries that hold one model alone, v1 and the last one, each freshly filled."""

    case: Case
    #: Rows of the records found, for each query.
    old: list[list[int]]
    new: list[list[int]]

    def quality(self, queries: Sequence[int]) -> dict[str, float]:
        """Return M_old and M_new over these queries."""
        return {
            name: quality([ranked[row] for row in queries], self.case.relevant[list(queries)], self.case.metric)
            for name, ranked in (("M_old", self.old), ("M_new", self.new))
        }


def ends(case: Case, at: Path) -> Ends:
    """Fill a gallery for the oldest model and one for the newest, and search both."""
    found = []
    with project(case, at):
        for number in (1, len(case.versions)):
            command("gallery", "add", f"{GALLERY}{number}", "--model", f"v{number}", "--source", case.source)
            with rmvdb.connect(gallery=f"{GALLERY}{number}") as client:
                fill(client, case)
                found.append(Searches(case, client, None).ranked(range(len(case.queries)), plain=True))
    return Ends(case, *found)


def fill(client: rmvdb.Client, case: Case) -> None:
    """Write the records, a few at a time: a write must end within its time, however busy the machine is."""
    for start in range(0, len(case.records), WRITTEN):
        client.upsert(case.records[start : start + WRITTEN])


def upgrade(case: Case, way: Way, seed: int, at: Path, ts: Sequence[float]) -> dict[str, Any]:
    """Return the curve of one upgrade, with what it was made of and what it took."""
    with project(case, at):
        command("gallery", "add", GALLERY, "--model", "v1", "--source", case.source)
        with rmvdb.connect(gallery=GALLERY) as client:
            fill(client, case)
            return _Upgrade(case, way, seed, client).run(ts)


class _Upgrade:
    """The steps of one upgrade while one client stays connected."""

    def __init__(self, case: Case, way: Way, seed: int, client: rmvdb.Client) -> None:
        self.case, self.way, self.seed, self.client = case, way, seed, client
        self.searches = Searches(case, client, way.rescore)
        rows = np.random.default_rng(seed).permutation(len(case.queries))
        self.logged, self.measured = (rows[::2], rows[1::2]) if way.log else (rows[:0], rows)

    def run(self, ts: Sequence[float]) -> dict[str, Any]:
        self._write_log()
        last = len(self.case.versions)
        if last == 3:
            self._go("v1", "v2", UNFINISHED, ())
        start = self.searches.quality(self.measured, plain=True)
        began = time.monotonic()
        command("plan", "--from", f"v{last - 1}", "--to", f"v{last}", *self._common(), *self.way.options)
        seconds = time.monotonic() - began
        points, extra = [], {}
        for t in ts:
            self._go(f"v{last - 1}", f"v{last}", t, self.way.options)
            points.append((self._moved(f"v{last}"), self.searches.quality(self.measured)))
            if t == 0:
                extra["extractions"], extra["items"] = self.searches.embedded()
            if t == ts[len(ts) // 2 - 1]:
                extra["ms"] = self.searches.milliseconds(self.measured)
        return {
            "measured": self.measured.tolist(),
            "start": start,
            "points": points,
            "area": area(points),
            "fall": largest_fall(points),
            "plan_seconds": round(seconds, 1),
            **extra,
            **self._chosen(),
        }

    def _common(self) -> list[str]:
        return ["--sample", str(self.case.sample), "--seed", str(self.seed)]

    def _go(self, old: str, new: str, t: float, options: Sequence[str]) -> None:
        # A plan with a warning is measured, too, and its row says so.
        risk = ["--accept-risk"] if "accept_risk" in {each.name for each in upgrade_command.params} else []
        command("upgrade", "--from", old, "--to", new, "--until", str(t), *self._common(), *options, *risk)

    def _write_log(self) -> None:
        lines = [json.dumps({"item": str(self.case.queries[row])}) for row in self.logged]
        Path("log.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def _moved(self, newest: str) -> float:
        """Return the true t: the share of records that the last collection holds."""
        opened = wiring.load(None)
        try:
            leg = next(leg for leg in opened.registry.plan(GALLERY).legs if leg.embedder == newest)
            return opened.store.count(leg.collection) / len(self.case.records)
        finally:
            opened.close()

    def _chosen(self) -> dict[str, Any]:
        """Return the method and the order of the upgrade as the registry has them, and what its plan says of itself."""
        opened = wiring.load(None)
        try:
            row = max(opened.registry.upgrades(opened.registry.gallery(GALLERY).id), key=lambda each: each.id)
            told = row.plan.prediction or {}
            about = {name: told.get(name) for name in ("verdict", "reason", "choice", "calibrated", "switch", "rescore")}
            return {"chosen": str(row.method), "order": str(row.order), "about": about}
        finally:
            opened.close()


class Searches:
    """A client's answers to the case's queries."""

    def __init__(self, case: Case, client: rmvdb.Client, rescore: int | None) -> None:
        self.case, self.client = case, client
        self._row = {record["id"]: row for row, record in enumerate(case.records)}
        self._options = {"rescore": rescore} if rescore is not None and can_rescore() else {}
        self._plain = {"rescore": 0} if can_rescore() else {}
        self._embedded = (0.0, 0.0)

    def quality(self, queries: Sequence[int] | range, *, plain: bool = False) -> float:
        """Return the case's metric over these queries. `plain` re-scores nothing."""
        memo.asked.clear()
        ranked = self.ranked(queries, plain=plain)
        versions = len(self.client.plan.embedders)
        self._embedded = versions, memo.asked["items"] / len(queries) - versions
        return quality(ranked, self.case.relevant[list(queries)], self.case.metric)

    def ranked(self, queries: Sequence[int] | range, *, plain: bool = False) -> list[list[int]]:
        """Return the rows of the records that each query finds, nearest first."""
        found: list[list[int]] = []
        several = max(1, min(TOGETHER, HITS // self.case.limit))
        for start in range(0, len(queries), several):
            some = [self.case.queries[row] for row in queries[start : start + several]]
            answers = self.client.search(some, limit=self.case.limit, **(self._plain if plain else self._options))
            found += [[self._row[hit.id] for hit in hits] for hits in answers]
        return found

    def embedded(self) -> tuple[float, float]:
        """Return the models that embed each query, and the records embedded per query, of the last look at the quality."""
        return self._embedded

    def milliseconds(self, queries: Sequence[int]) -> float:
        """Return the median time of a search for ten records, the embedding of its query included."""
        times = []
        with memo.live():
            for row in list(queries)[:TIMED_SEARCHES]:
                began = time.perf_counter()
                self.client.search(self.case.queries[row], limit=10, **self._options)
                times.append(1000 * (time.perf_counter() - began))
        return round(statistics.median(times), 1)


@contextlib.contextmanager
def project(case: Case, at: Path) -> Iterator[None]:
    """Make a project with the case's models in this folder, and stay there."""
    at.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(at):
        command("init")
        batch = max(1, len(case.records) // 50)
        _set(Path("rmvdb.toml"), {**SETTINGS, "batch": batch})
        for number, version in enumerate(case.versions, start=1):
            options = ["--options", json.dumps(dict(version.options))] if version.options else []
            command("model", "add", f"v{number}", "--embedder", version.embedder, *options)
        yield


def command(*arguments: str) -> None:
    """Run the command line in this process, where torch is imported already; its output goes to log.txt.

    Raises: Failed.
    """
    with Path("log.txt").open("a+", encoding="utf-8") as log:
        log.write(f"$ rmvdb {' '.join(arguments)}\n")
        before = log.tell()
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            code = rmvdb_command.main(args=list(arguments), standalone_mode=False)
        if code:
            log.seek(before)
            said = [line for line in log.read().splitlines() if line.strip()] or ["nothing"]
            raise Failed(_told(said[-1], f"rmvdb {' '.join(arguments)} ended with {code}"))


def _told(said: str, ended: str) -> str:
    if "would start below the old model" in said:
        return f"{REFUSED}{said.removeprefix('Error: ')}"
    return f"{ended}: {said} ({Path.cwd()})"


def _set(file: Path, settings: dict[str, float]) -> None:
    """Take the # away from these settings and give them their value."""
    text = file.read_text(encoding="utf-8")
    for key, value in settings.items():
        text, found = re.subn(rf"^# {key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
        if not found and key != "rescore_ms":
            raise Failed(f"rmvdb.toml has no setting {key}")
    file.write_text(text, encoding="utf-8")
