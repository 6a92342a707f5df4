"""A stress run: upgrades and roll backs one after the other while applications write and search and things are killed."""

from __future__ import annotations

import json
import random
import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import rmvdb
from tests.stress.application import fields
from tests.stress.models import TEXT
from tests.stress.parts import PATIENCE, Broken
from tests.stress.trouble import Trouble
from tests.stress.upgrades import Upgrades
from tests.support.project import Project

#: The last error of a traceback, and not one that was handled when another came.
CRASH = re.compile(r"^Traceback .*\n(?:[ \t].*\n|\n)*(\S.*)\n(?!\n(?:During handling|The above exception))", re.MULTILINE)


@dataclass
class Run(Trouble, Upgrades):
    """One run on one engine and one registry, from the first record to the last comparison."""

    def run(self) -> dict[str, Any]:
        """Fill the gallery, run for as long as asked, end what was begun, compare; the counts."""
        self._fill()
        started = time.monotonic()
        driver = threading.Thread(target=self._drive, name="driver", daemon=True)
        intruder = threading.Thread(target=self._intrude, name="intruder", daemon=True)
        try:
            self._start_processes()
            driver.start()
            intruder.start()
            self._trouble(driver)
            self.over.set()
            self._calm(driver)
            intruder.join(PATIENCE)
            self._expect_no_crash(intruder)
            self._checkpoint()
        finally:
            self.over.set()
            for each in self.processes:
                each.process.send_signal(signal.SIGCONT)
                each.process.kill()
                each.process.wait()
            self.app.close()
        return self._counts(time.monotonic() - started)

    def _fill(self) -> None:
        (self.project.folder / "models.py").write_text(TEXT)
        (self.project.folder / "stress.json").write_text(json.dumps({"records": self.records}))
        self.project.run("init")
        for name, metric in (("a", "IP"), ("b", "COSINE")):
            self.project.run("model", "add", name, "--embedder", f"models:{name}", "--metric", metric)
        typed = [word for name in ("edition", "shard", "label") for word in ("--field", f"{name}:INT64")]
        self.project.run("gallery", "add", "things", "--model", "a", "--source", "call:models:things", *typed)
        self.models = self.project.models()
        started = time.monotonic()
        with self.project.client() as client:
            for first in range(0, self.records, 500):
                ids = range(first, min(first + 500, self.records))
                client.upsert([{"id": id, "item": self.models.item(id, 0), **fields(self.models, id, 0)} for id in ids])
        self.app = rmvdb.app.load(self.project.folder)
        # A server searches so many fresh rows in part until they have an index, without rmvdb, too.
        for leg in self.app.registry.plan("things").legs:
            self.app.store.settle(leg.collection)
        self.say(f"{self.records} records written in {time.monotonic() - started:.0f} s")

    def _intrude(self) -> None:
        """Another registry, which believes a collection of this one to be its own, tries to take it again and again."""
        chosen = random.Random(f"{self.seed} intruder")
        try:
            other = self._other_project()
            while not self.over.wait(chosen.uniform(10.0, 30.0)):
                with self.whole:
                    collection = chosen.choice([leg.collection for leg in self.app.registry.plan("things").write_targets])
                words = ("gallery", "add", f"theirs{self.intrusions}", "--model", "a", "--collection", collection)
                done = other.run(*words, "--source", "call:models:things", code=None, timeout=PATIENCE)
                self.intrusions += 1
                self.recognized += "of another registry" in done.stderr
                if done.returncode == 0:
                    self.adopted += 1
                    self.say(f"another registry was let into {collection}")
        except BaseException as exc:  # noqa: BLE001 (it is raised again in the main thread)
            self.driver_error = self.driver_error or exc

    def _expect_no_crash(self, intruder: threading.Thread) -> None:
        """Expect that only kills ended the applications, and that the other registry was refused because it is another one."""
        if self.driver_error is not None:
            raise self.driver_error
        if intruder.is_alive() or (self.intrusions > 20 and not self.recognized):
            raise Broken(f"of {self.intrusions} tries of another registry, {self.recognized} were refused as such")
        for kind in ("writer", "searcher"):
            for out in sorted(self.project.folder.glob(f"{kind}-*.out")):
                for error in CRASH.findall(out.read_text(errors="replace")):
                    if not error.startswith("rmvdb.errors."):  # a part was away when it began
                        self.verdict.complain("failed_searches", f"{out.name}: {error[:200]}")

    def _other_project(self) -> Project:
        address = self.engine.address or str(self.project.folder / ".rmvdb" / "milvus.db")
        other = Project(self.project.folder / "another", milvus=address)
        (other.folder / "models.py").write_text(TEXT)
        other.run("init")
        other.run("model", "add", "a", "--embedder", "models:a", "--metric", "IP")
        return other
