"""The demo's application: a process of its own that searches and writes all the time, and counts what goes wrong.

It knows nothing of upgrades: it calls `rmvdb.connect` once, then `search`, `upsert`, `delete`. It reads commands as lines of
JSON and answers each with a line. It ends when its input ends.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import rmvdb

#: Ids from here on are records that come and go; quality is not measured on them.
VISITORS = 1_000_000
#: At most this many hits are asked for in one call, so that no call takes long.
HITS = 20_000
COUNTED = ("searches", "failed", "missed", "duplicates", "writes", "writes_failed", "writes_unseen")
#: Seconds between two searches, and between two writes.
SEARCH_PAUSE, WRITE_PAUSE = 0.02, 0.5


class Tally:
    """Counts of calls and of errors, kept by several threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.errors: list[str] = []
        self.slowest = 0.0
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        with self._lock:
            self.counts.update(counts)

    def note(self, words: str) -> None:
        """Keep what is worth reading afterwards."""
        with self._lock:
            self.errors.append(f"{time.strftime('%H:%M:%S')} {words}")

    @contextmanager
    def watched(self, failure: str) -> Iterator[None]:
        """Count what fails instead of ending: an application's users would see it."""
        started = time.monotonic()
        try:
            yield
        except Exception as exc:  # noqa: BLE001 (whatever it is, it is what a user would have met)
            self.add(**{failure: 1})
            self.note(f"{type(exc).__name__}: {exc}")
        self.slowest = max(self.slowest, time.monotonic() - started)


class Round:
    """Every query's hits, in order (Q, n): their ids, -1 if none came, and whether they were re-embedded."""

    def __init__(self, rescore: int | None, queries: int, records: int) -> None:
        self.rescore = rescore
        self.ids, self.new = (np.full((queries, records), none) for none in (-1, False))

    def keep(self, at: int, answers: list[list[rmvdb.Hit]], *, old: str) -> None:
        """Keep the answers to the queries from number `at` on. `old`: the collection of records that were not re-embedded."""
        for row, hits in enumerate(answers, start=at):
            self.ids[row, : len(hits)] = [int(hit.id) for hit in hits]
            self.new[row, : len(hits)] = [hit.leg != old for hit in hits]


class Application:
    """Searches and writes one gallery."""

    def __init__(self, client: rmvdb.Client) -> None:
        self.client = client
        self.tally = Tally()
        self.queries = sorted(Path("queries").glob("*.png"), key=lambda path: int(path.stem))
        self.expected: set[int] = set()
        #: The share of the gallery that the last full search found in another collection than the first.
        self.t = 0.0
        self._first = client.plan.legs[0].collection
        self._stop, self._unfollow = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    # --- commands -----------------------------------------------------------------------------------------------------

    def fill(self, first: int, last: int, labels: list[int] | None = None) -> dict[str, Any]:
        """Put the photos first … last - 1 into the gallery, with their labels if there are any."""
        fields = [{"label": label} for label in labels] if labels else [{}] * (last - first)
        records = [{"id": id, "item": _photo(id), **more} for id, more in zip(range(first, last), fields, strict=True)]
        self.client.upsert(records)
        self.expected |= set(range(first, last))
        return {"records": self.client.count()}

    def traffic(self) -> dict[str, Any]:
        """Search and write from now on, until the end."""
        for work, pause in ((self._search, SEARCH_PAUSE), (self._write, WRITE_PAUSE)):
            self._start(work, pause)
        return {}

    def measure(self, name: str, first: int) -> dict[str, Any]:
        """Rank all records from id `first` on for every query, as the plan says and without rescoring: rounds/{name}*.npz.

        The backfill goes on meanwhile. So each query is asked in both ways one after the other: both then are of one moment.
        """
        started = time.monotonic()
        wanted = {id for id in self.expected if id >= first}
        rounds = {f"{name}-plain": Round(0, len(self.queries), len(wanted)), name: Round(None, len(self.queries), len(wanted))}
        size = max(1, HITS // len(wanted))
        measured = f"id >= {first} and id < {VISITORS}"
        for at in range(0, len(self.queries), size):
            for each in rounds.values():
                with self.tally.watched("failed"):
                    answers = self._ranked(self.queries[at : at + size], wanted, filter=measured, rescore=each.rescore)
                    each.keep(at, answers, old=self._first)
        Path("rounds").mkdir(exist_ok=True)
        for file, each in rounds.items():
            np.savez(f"rounds/{file}.npz", ids=each.ids, new=each.new)
        return {"name": name, "t": float(rounds[name].new.mean()), "seconds": time.monotonic() - started}

    def follow(self, first: int, say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Measure each time another tenth of the gallery has moved, until `unfollow`; each round is told when it is done."""
        names = (f"{number:02d}" for number in itertools.count(1))

        def look(due: list[float]) -> None:
            if self.t >= due[0]:
                told = self.measure(next(names), first)
                # A tenth that passed while this round was measured is not measured again.
                passed = int(max(told["t"], self.t) * 10 + 1e-9)
                due[0] = min(1.0, (passed + 1) / 10) if told["t"] < 1 else float("inf")
                say({"answer": "round", **told})

        due = [0.1]
        self._start(lambda: look(due), SEARCH_PAUSE, until=self._unfollow)
        return {}

    def unfollow(self) -> dict[str, Any]:
        """Measure no more."""
        self._unfollow.set()
        self._threads.pop().join()
        return {}

    def end(self) -> dict[str, Any]:
        """Stop, and tell the tally."""
        self._stop.set()
        self._unfollow.set()
        for thread in self._threads:
            thread.join()
        return {**self.tally.counts, "slowest": self.tally.slowest, "errors": self.tally.errors[:5]}

    # --- what it does all the time ------------------------------------------------------------------------------------

    def _start(self, work: Callable[[], None], pause: float, *, until: threading.Event | None = None) -> None:
        ended = until or self._stop

        def repeat() -> None:
            while not ended.wait(pause):
                work()

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _search(self) -> None:
        """A search as a user makes it, and every tenth time one that must return the whole gallery."""
        item: Any = random.choice(self.queries)
        with self.tally.watched("failed"):
            if random.random() < 0.1:
                hits = self._ranked([item], self.expected)[0]
                self.t = sum(hit.leg != self._first for hit in hits) / len(hits)
                return
            hits = self.client.search(item, limit=10)
            self.tally.add(searches=1, missed=10 - len(hits), duplicates=len(hits) - len({hit.id for hit in hits}))

    def _ranked(
        self, items: list[Any], wanted: set[int], *, filter: str = "", rescore: int | None = None
    ) -> list[list[rmvdb.Hit]]:
        """All that is wanted, ranked for each item; what is not there, or there twice, is counted."""
        answers = self.client.search(items, limit=len(wanted) + 10, filter=filter, rescore=rescore)
        for hits in answers:
            found = {hit.id for hit in hits}
            missed = wanted - found
            self.tally.add(searches=1, missed=len(missed), duplicates=len(hits) - len(found))
            if missed:
                self.tally.note(f"missed {len(missed)} records, such as {sorted(missed)[:5]}, {self._when()}")
        return answers

    def _write(self) -> None:
        """Write a record again; let a new one come and go, and look whether searches agree."""
        with self.tally.watched("writes_failed"):
            again = random.choice(sorted(self.expected))
            self.client.upsert([{**self.client.get(again)[0].fields, "id": again, "item": _photo(again)}])
            visitor, item = VISITORS + self.tally.counts["writes"], self.queries[0]
            self.client.upsert([{"id": visitor, "item": item}])
            came = visitor in self._found(item)
            self.client.delete(visitor)
            left = visitor not in self._found(item)
            self.tally.add(writes=3, writes_unseen=int(not came) + int(not left))
            if not (came and left):
                self.tally.note(f"record {visitor} {'stayed' if came else 'did not come'}, {self._when()}")

    def _when(self) -> str:
        return f"near t = {self.t:.2f} in epoch {self.client.plan.epoch}"

    def _found(self, item: Any) -> set[rmvdb.types.Id]:
        return {hit.id for hit in self._ranked([item], self.expected)[0]}


def _photo(id: int) -> Path:
    return Path("photos") / f"{id}.png"


def main() -> None:
    """Take commands until the input ends."""
    # Ctrl-C in the terminal reaches every process of the demo; this one ends when the demo closes its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    telling = threading.Lock()

    def say(answer: dict[str, Any]) -> None:
        with telling:
            print(json.dumps(answer), flush=True)

    with rmvdb.connect(gallery="photos") as client:
        application = Application(client)
        for line in sys.stdin:
            asked = json.loads(line)
            command = asked.pop("command")
            more = {"say": say} if command == "follow" else {}
            say({"answer": command, **getattr(application, command)(**asked, **more)})
        application.end()


if __name__ == "__main__":
    main()
