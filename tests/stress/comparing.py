"""The comparisons of a stress run: searches with the truth, and collections with it."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmvdb.items.check import distances
from rmvdb.types import Phase, Record
from tests.stress.application import SHARDS
from tests.stress.parts import PATIENCE, SLOW, Broken, Parts
from tests.stress.truth import GONE, Log


@dataclass
class Comparing(Parts):
    """Judge every search, and now and then every record."""

    def _read(self) -> None:
        """Take in what the applications wrote down, and judge every search that lies a moment back."""
        for path in sorted(self.project.folder.glob("*.jsonl")):
            log = self.logs.setdefault(path.stem, Log(path))
            for line in log.new():
                if "write" in line and "trouble" not in line:
                    self.truth.read([line], path.stem)
                elif "trouble" in line:
                    self.failed_writes += "write" in line
                    self.say(f"{path.stem}: {line['trouble'][:200]}") if "write" in line else None
                elif "asked" in line:
                    self._learn(line)
                elif "poison" in line:
                    self.poison += 1
                    if not line["refused"]:
                        self.verdict.complain("poisoned", f"{path.stem}: {line['poison']} was not refused")
                else:
                    self.waiting.append((path.stem, line))
        settled = time.monotonic() - 1.0
        rest = []
        for who, line in self.waiting:
            if line.get("end", 0.0) > settled or line.get("at", 0.0) > self.probed:
                rest.append((who, line))
            else:
                self._judge(who, line)
        self.waiting = rest

    def _learn(self, plain: dict[str, Any]) -> None:
        """Note the outcome of a plain search, and with it of every one before."""
        self.probed = plain["asked"]
        if plain["failed"] or plain["answered"] - plain["asked"] > SLOW:
            self.unanswered.append((plain["asked"], plain["answered"]))

    def _judge(self, who: str, line: dict[str, Any]) -> None:
        self.verdict.searches += 1
        if "failed" in line:
            if self._silent(line["started"], line["at"]):
                self.excused += 1
            else:
                self.verdict.complain("failed_searches", f"{who} at {line['at']:.3f}: {line['failed'][:300]}")
        elif "own" in line:
            if line["shown"] != line["expected"]:
                kind = "duplicated" if len(line["shown"]) > 1 else "stale_reads"
                self.verdict.complain(kind, f"{who}: its own record {line['own']} is {line['shown']}, not {line['expected']}")
        else:
            self.truth.judge(line["shard"], line["hits"], line["start"], line["end"], self.verdict, who)

    def _checkpoint(self) -> None:
        """With no write under way, both collections together hold the truth, and their vectors are their models'."""
        with self._quiet():
            self._compare()
        self.checkpoints += 1
        self.truth.forget_before(time.monotonic() - 60.0)
        self.say(json.dumps(self._counts(0.0) | {"now": {key: self._status()[key] for key in ("phase", "t", "rolls_back")}}))

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Let applications stand still while no collection is dropped."""
        quiet = self.project.folder / "quiet"
        quiet.touch()
        try:
            with self._steadied():
                self._wait_until_quiet()
                yield
        finally:
            quiet.unlink()
            for path in self.project.folder.glob("quiet-*"):
                path.unlink()

    @contextmanager
    def _steadied(self) -> Iterator[None]:
        while not self.steady.acquire(timeout=0.1):
            self._read()  # the thread that has it may wait for the outcome of plain searches
        try:
            yield
        finally:
            self.steady.release()

    def _wait_until_quiet(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self._revive()
            self._read()
            alive = {
                f"quiet-{each.name}-{each.process.pid}" for each in self.processes if each.name.startswith(("writer", "searcher"))
            }
            if all((self.project.folder / name).exists() for name in alive) and not self.waiting:
                return
            time.sleep(0.1)
        raise Broken("an application, or the probe, did not come to rest: its last call hangs")

    def _compare(self) -> None:
        before = copy.deepcopy(self.verdict)

        def compare() -> None:
            self.verdict = copy.deepcopy(before)
            self._compare_collections(time.monotonic())

        self._answered(compare)

    def _compare_collections(self, now: float) -> None:
        plan = self.app.registry.plan("things")
        upgrade = self.app.registry.active_upgrade(self.app.registry.gallery("things").id)
        lifted = upgrade is not None and upgrade.in_place and upgrade.phase in (Phase.PLANNED, Phase.SERVING_BOTH)
        found: dict[int, int] = {}
        for leg in reversed(plan.legs):  # the one that is emptied first: what leaves it is in the next one
            exact = leg is plan.legs[0] and leg.write_with is None and not lifted
            for page in self.app.store.scan(leg.collection, fields=["edition"], vector=exact):
                held = {int(record.id): record.fields["edition"] for record in page}
                self._compare_leg(leg.collection, held, now)
                found |= held
                if exact:
                    self._compare_vectors(leg.model, page)
        self._compare_all(found, now, "the collections")
        if self._status()["phase"] != "planned":  # while a copy is made it is not whole
            for mirror in plan.mirrors:  # as much the truth as what is searched
                pages = self.app.store.scan(mirror.collection, fields=["edition"])
                held = {int(record.id): record.fields["edition"] for page in pages for record in page}
                self._compare_all(held, now, f"the mirror {mirror.collection}")

    def _compare_all(self, found: dict[int, int], now: float, who: str) -> None:
        for shard in range(SHARDS):
            hits = [(id, edition) for id, edition in found.items() if id % SHARDS == shard]
            self.truth.judge(shard, hits, now, now, self.verdict, who)

    def _compare_leg(self, collection: str, held: dict[int, int], now: float) -> None:
        """Expect that no collection holds replaced or deleted content, even if another one holds the truth."""
        for id, edition in held.items():
            if edition not in (allowed := self.truth.allowed(id, now, now)):
                kind = "resurrected" if allowed == {GONE} else "stale_reads"
                self.verdict.complain(kind, f"{collection} holds record {id} as {edition}, not {sorted(allowed)}")

    def _compare_vectors(self, model: str, page: Sequence[Record]) -> None:
        expected = self.app.loaded_models.apply_head(
            model, self.app.loaded_models.embed(model, [self.models.item(record.id, record.fields["edition"]) for record in page])
        )
        stored = np.stack([record.vector for record in page if record.vector is not None])
        for at in np.flatnonzero(~(distances(stored, expected) <= 1e-5)):  # in direction and in length; NaN is no vector
            self.verdict.complain("stale_reads", f"the vector of record {page[at].id} is not its item's by {model}")
