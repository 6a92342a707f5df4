"""The contents that the gallery must have: every write that an application noted, and the answers that this allows.

Each record belongs to one writer, which writes it down before it begins a write and after the write returned. A write that
never returned (its process was killed) may or may not have been made, until the next one of the same record has returned.
Times are the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The edition of a record that is not there.
GONE = -1
FOREVER = float("inf")


@dataclass(slots=True)
class Write:
    """One write of one record."""

    begin: float
    edition: int
    end: float = FOREVER


class Log:
    """A file of JSON lines that another process appends to; only whole lines are read."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def new(self) -> Iterable[dict[str, Any]]:
        """Return the lines that were added since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = self._rest + file.read()
            self._at = file.tell()
        *lines, self._rest = data.split(b"\n")
        return [json.loads(line) for line in lines]


@dataclass
class Verdict:
    """The number of comparisons, and the differences."""

    searches: int = 0
    writes: int = 0
    lost: int = 0
    duplicated: int = 0
    stale_reads: int = 0
    resurrected: int = 0
    failed_searches: int = 0
    #: Poison that was not refused.
    poisoned: int = 0
    #: The first problems, in words.
    examples: list[str] = field(default_factory=list)

    def complain(self, kind: str, words: str) -> None:
        """Count a problem."""
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.examples) < 40:
            self.examples.append(f"{kind}: {words}")

    @property
    def problems(self) -> int:
        """How many there were of any kind."""
        return self.lost + self.duplicated + self.stale_reads + self.resurrected + self.failed_searches + self.poisoned


class Truth:
    """Every record's writes, and the shards that records are searched by."""

    def __init__(self, records: int, *, shards: int) -> None:
        self.shards = shards
        self.writes: dict[int, list[Write]] = {id: [Write(begin=0.0, edition=0, end=0.0)] for id in range(records)}
        self._of_shard: dict[int, set[int]] = defaultdict(set)
        for id in self.writes:
            self._of_shard[id % shards].add(id)
        self._open: dict[str, list[Write]] = {}
        self.returned = 0
        #: Records that were written while the registry was at a state that it later lost.
        self.forgotten: set[int] = set()

    def read(self, lines: Iterable[dict[str, Any]], writer: str) -> None:
        """Take in what a writer wrote down: {"begin": t, "write": n, "ids": […], "edition": e}, then {"end": t, "write": n}."""
        for line in lines:
            name = f"{writer}/{line['write']}"
            if "end" in line:
                for write in self._open.pop(name):
                    write.end = line["end"]
                    self.returned += 1
            else:
                self._open[name] = [self._begun(id, line) for id in line["ids"]]

    def _begun(self, id: int, line: dict[str, Any]) -> Write:
        write = Write(begin=line["begin"], edition=line["edition"])
        self.writes.setdefault(id, [Write(begin=0.0, edition=GONE, end=0.0)]).append(write)
        self._of_shard[id % self.shards].add(id)
        return write

    def may_come_back(self, since: float, now: float) -> None:
        """The registry has forgotten what was written since then. What was deleted, a repair may put back from the archive."""
        for id, writes in self.writes.items():
            if any(write.begin >= since for write in writes):
                self.forgotten.add(id)
            if writes[-1].edition == GONE and writes[-1].begin >= since and len(writes) > 1:
                writes.append(Write(begin=now, edition=writes[-2].edition))

    def forget_before(self, time: float) -> None:
        """Drop writes that no search after that moment can show."""
        for id, writes in self.writes.items():
            if len(writes) > 1:
                self.writes[id] = _possible(writes, time, FOREVER)

    def allowed(self, id: int, start: float, end: float) -> set[int]:
        """Return the editions that a search which looked between these moments may have shown, GONE among them."""
        return {write.edition for write in _possible(self.writes[id], start, end)} if id in self.writes else {GONE}

    def judge(self, shard: int, hits: Sequence[Sequence[int]], start: float, end: float, verdict: Verdict, who: str) -> None:
        """Compare an answer that must hold every live record of a shard, (id, edition) each, with what was allowed."""
        shown: dict[int, int] = {}
        for id, edition in hits:
            if id in shown:
                verdict.complain("duplicated", f"{who}: record {id} twice at {end:.3f}")
            shown[id] = edition
        for id in self._of_shard[shard] | shown.keys():
            allowed, found = self.allowed(id, start, end), shown.get(id, GONE)
            if found in allowed:
                continue
            kind = "lost" if found == GONE else "resurrected" if allowed == {GONE} else "stale_reads"
            verdict.complain(kind, f"{who}: record {id} is {found}, not {sorted(allowed)}, between {start:.3f} and {end:.3f}")


def _possible(writes: Sequence[Write], start: float, end: float) -> list[Write]:
    """Return the writes whose content searches may have shown between these moments."""
    settled = max((at for at, write in enumerate(writes) if write.end <= start), default=0)
    return [write for write in writes[settled:] if write.begin <= end]
