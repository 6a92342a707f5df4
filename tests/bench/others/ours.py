"""rmvdb, by its command line and its client."""

from __future__ import annotations

import contextlib
from pathlib import Path

import rmvdb
from rmvdb.app import wiring
from tests.bench.curves.cases import Case
from tests.bench.curves.run import GALLERY, command, fill, project


class Rmvdb:
    """An upgrade with a plan of its own, from t = 0 on."""

    def __init__(self, case: Case, at: Path, *options: str) -> None:
        self.case, self.options, self.stack = case, options, contextlib.ExitStack()
        self.stack.enter_context(project(case, at))
        command("gallery", "add", GALLERY, "--model", "v1", "--source", case.source)
        self.client = self.stack.enter_context(rmvdb.connect(gallery=GALLERY))
        fill(self.client, case)
        self.row = {record["id"]: row for row, record in enumerate(case.records)}
        self.go(0.0)

    @property
    def moved(self) -> float:
        """The share of records that the new collection holds."""
        return self._count() / len(self.case.records)

    @property
    def chosen(self) -> str:
        """Say what the plan is: its method, its order, and how many hits it rescores."""
        opened = wiring.load(None)
        try:
            row = max(opened.registry.upgrades(opened.registry.gallery(GALLERY).id), key=lambda each: each.id)
            rescored = (row.plan.prediction or {}).get("rescore")
            return f"{row.method} in {row.order} order{f', rescoring {rescored}' if rescored else ''}"
        finally:
            opened.close()

    def go(self, t: float) -> int:
        """Move records up to this share; return how many were moved."""
        before = self._count() if t else 0
        sample = ("--sample", str(self.case.sample), "--seed", "0")
        command("upgrade", "--from", "v1", "--to", "v2", "--until", str(t), *sample, *self.options, "--accept-risk")
        return self._count() - before

    def search(self, query: str) -> list[int]:
        """Return the rows of ten records."""
        return [self.row[hit.id] for hit in self.client.search(query, limit=10)]

    def write(self, row: int, text: str) -> None:
        """Change a record."""
        self.client.upsert([{**self.case.records[row], "text": text}])

    def close(self) -> None:
        """Let go of everything."""
        self.stack.close()

    def _count(self) -> int:
        opened = wiring.load(None)
        try:
            # A blend embeds its queries for the old collection by v2, too; the new collection stands first.
            newest = next(leg for leg in opened.registry.plan(GALLERY).legs if leg.embedder == "v2")
            return opened.store.count(newest.collection)
        finally:
            opened.close()
