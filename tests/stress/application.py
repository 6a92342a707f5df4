"""One application process of a stress run: a writer or a searcher, by rmvdb's client. It may be killed at any moment.

python -m tests.stress.application writer FOLDER NUMBER OF SEED
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rmvdb
from rmvdb.errors import EngineUnavailable, RegistryError, RmvdbError, StalePlan
from tests.stress.truth import GONE, Log

#: Ids from here on belong to records that were not there at the beginning.
NEW = 1_000_000
SHARDS = 40


def fields(models: Any, id: int, edition: int) -> dict[str, Any]:
    """Return the scalar fields of a record; its label is the class of the item that the models make of it, and its hint the side
    information without which neither model's vectors tell enough of the other's to be lifted."""
    hint = [round(float(part), 3) for part in models.latent(id, edition)]
    return {"edition": edition, "shard": id % SHARDS, "label": (models.label(id) + edition) % models.CLASSES, "hint": hint}


class Application:
    """The state that writers and searchers share."""

    def __init__(self, kind: str, folder: Path, number: int, of: int, seed: int) -> None:
        sys.path.insert(0, str(folder))
        import models

        self.models, self.folder, self.number, self.of = models, folder, number, of
        self.settings = json.loads((folder / "stress.json").read_text())
        self.name = f"{kind}-{number}-{os.getpid()}"
        self.random = random.Random(f"{seed} {kind} {number} {len(list(folder.glob(f'{kind}-{number}-*')))}")
        self.log = (folder / f"{self.name}.jsonl").open("a", buffering=1)
        self.client = self._connected()

    def _connected(self) -> rmvdb.Client:
        while True:
            try:
                return rmvdb.connect(self.folder)
            except RmvdbError as exc:  # the registry may be away just now
                self.note(trouble=f"connect: {exc}", at=time.monotonic())
                time.sleep(0.5)

    def note(self, **values: Any) -> None:
        """Write down a line, which is read whatever happens to this process."""
        self.log.write(json.dumps(values) + "\n")

    def wait_while_quiet(self) -> None:
        """Stand still while the run compares."""
        while (self.folder / "quiet").exists():
            (self.folder / f"quiet-{self.name}").touch()
            time.sleep(0.1)


class Writer(Application):
    """Upserts, deletes and inserts records of its own, and looks at once whether its own search shows them."""

    def __init__(self, folder: Path, number: int, of: int, seed: int) -> None:
        super().__init__("writer", folder, number, of, seed)
        self.now: dict[int, int] = {id: 0 for id in range(self.settings["records"]) if id % of == number}
        self.poisons = random.Random(f"{seed} poison {number}")  # of its own: the other choices of a seed stay what they were
        self.edition = self.write = 0
        self._remember()
        self.new = max([NEW + number, *(id for id in self.now if id >= NEW)])

    def _remember(self) -> None:
        """Read the writes of the processes before this one, and which of their records are uncertain."""
        unsure: dict[str, list[int]] = {}
        for path in sorted(self.folder.glob(f"writer-{self.number}-*.jsonl"), key=lambda path: path.stat().st_mtime):
            for line in Log(path).new():
                if "begin" in line:
                    unsure[f"{path}/{line['write']}"] = line["ids"]
                    self.now |= dict.fromkeys(line["ids"], line["edition"])
                    self.edition = max(self.edition, line["edition"])
                elif "end" in line:
                    unsure.pop(f"{path}/{line['write']}")
        self.unsure = sorted({id for ids in unsure.values() for id in ids})

    def run(self) -> None:
        """Write until it is killed."""
        while True:
            self.wait_while_quiet()
            if self.unsure:  # as an application would: what has not returned is written again
                ids, self.unsure = self.unsure[:20], self.unsure[20:]
                if not self._upsert(ids):
                    self.unsure += ids
                continue
            self._something()
            time.sleep(self.random.uniform(0.02, 0.3))

    def _something(self) -> None:
        live = [id for id, edition in self.now.items() if edition != GONE]
        gone = [id for id, edition in self.now.items() if edition == GONE]
        kind = self.random.random()
        if self.poisons.random() < 0.1:
            self._poison()
        if kind < 0.55:
            self._upsert(self.random.sample(live, self.random.choice((1, 1, 3, 20))))
        elif kind < 0.7:
            self._delete(self.random.sample(live, self.random.choice((1, 2, 5))))
        elif kind < 0.8 and gone:
            self._upsert(self.random.sample(gone, min(len(gone), 3)))
        else:
            first = self.new + self.of
            ids = list(range(first, first + self.of * self.random.choice((1, 4)), self.of))
            self.new = ids[-1]
            self._upsert(ids)

    def _poison(self) -> None:
        """Send poison, which no engine may get: the call is refused as a whole, and the record beside it does not change."""
        good = self.random.choice([id for id, edition in self.now.items() if edition != GONE])
        item = self.models.item(good, self.edition)
        row = {"id": good, "item": item, **fields(self.models, good, self.edition)}
        kind, call = self.random.choice(
            [
                ("a declared field without a value", lambda: self.client.upsert([row, row | {"shard": None}])),
                ("a number that its field cannot hold", lambda: self.client.upsert([row, row | {"label": 2**70}])),
                ("a text in a field of numbers", lambda: self.client.upsert([row, row | {"edition": "x"}])),
                ("an id that is no whole number", lambda: self.client.upsert([row, row | {"id": good + 0.5}])),
                ("a number that JSON does not have", lambda: self.client.upsert([row, row | {"extra": float("nan")}])),
                ("an id in bytes", lambda: self.client.delete(str(good).encode())),
                ("a division by zero", lambda: self.client.search(item, filter=f"id / 0 == {good}")),
                ("two filters", lambda: self.client.search(item, filter=f"id == {good}; shard >= 0")),
            ]
        )
        started = time.monotonic()
        try:
            call()
        except (EngineUnavailable, RegistryError, StalePlan) as exc:  # a part was away
            self.note(failed=f"poison: {exc}", at=time.monotonic(), started=started)
        except RmvdbError:
            self.note(poison=kind, refused=True)
        else:
            self.note(poison=kind, refused=False)

    def _upsert(self, ids: Sequence[int]) -> bool:
        self.edition += 1
        rows = [{"id": id, "item": self.models.item(id, self.edition), **fields(self.models, id, self.edition)} for id in ids]
        return self._written(ids, self.edition, lambda: self.client.upsert(rows))

    def _delete(self, ids: Sequence[int]) -> bool:
        return self._written(ids, GONE, lambda: self.client.delete(list(ids)))

    def _written(self, ids: Sequence[int], edition: int, call: Any) -> bool:
        self.write += 1
        self.note(begin=time.monotonic(), write=self.write, ids=list(ids), edition=edition)
        self.now |= dict.fromkeys(ids, edition)
        try:
            call()
        except RmvdbError as exc:
            self.note(trouble=f"write: {exc}", at=time.monotonic(), write=self.write, begin_failed=True)
            self.unsure += ids
            time.sleep(0.3)
            return False
        self.note(end=time.monotonic(), write=self.write)
        self._look(ids, edition)
        return True

    def _look(self, ids: Sequence[int], edition: int) -> None:
        """Expect that a search of the same client shows the write, and nothing that it replaced."""
        id = self.random.choice(list(ids))
        self._look_for(id, f"id in [{id}]", [] if edition == GONE else [edition])
        # No leg holds what was replaced: a filter that only the older content passes finds nothing.
        self._look_for(id, f"id in [{id}] and edition != {edition}", [])

    def _look_for(self, id: int, filter: str, expected: list[int]) -> None:
        started = time.monotonic()
        try:
            hits = self.client.search(self.models.item(id, 0), limit=10, filter=filter, output_fields=["edition"])
        except RmvdbError as exc:
            self.note(failed=f"search: {exc}", at=time.monotonic(), started=started)
            return
        self.note(own=id, shown=[hit.fields["edition"] for hit in hits], expected=expected)


class Searcher(Application):
    """Searches one shard after the other, and writes down everything that it was shown."""

    def __init__(self, folder: Path, number: int, of: int, seed: int) -> None:
        super().__init__("searcher", folder, number, of, seed)

    def run(self) -> None:
        """Search until it is killed."""
        while True:
            self.wait_while_quiet()
            shard, strong = self.random.randrange(SHARDS), self.random.random() < 0.3
            started = time.monotonic()
            try:
                hits = self.client.search(
                    self.models.item(self.random.randrange(self.settings["records"]), 0),
                    limit=2 * self.settings["records"] // SHARDS + 200,
                    filter=f"shard == {shard}",
                    output_fields=["edition"],
                    consistency="Strong" if strong else "",
                )
            except RmvdbError as exc:
                self.note(failed=f"search: {exc}", at=time.monotonic(), started=started)
                time.sleep(0.1)
                continue
            looked = started if strong else started - self.client.plan.staleness
            self.note(shard=shard, start=looked, end=time.monotonic(), hits=[(hit.id, hit.fields["edition"]) for hit in hits])
            time.sleep(self.random.uniform(0.0, 0.1))


def main() -> None:
    """Be one application."""
    kind, folder, number, of, seed = sys.argv[1:]
    made = {"writer": Writer, "searcher": Searcher}[kind](Path(folder), int(number), int(of), int(seed))
    made.run()


if __name__ == "__main__":
    main()
