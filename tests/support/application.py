"""An application that searches the whole gallery all the time, and what it saw."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

import rmvdb
from rmvdb.types import Id
from tests.support.project import Project


@dataclass
class Watch:
    """The observations of an application that searches all the time."""

    searches: int = 0
    failed: list[str] = field(default_factory=list)
    missed: list[Any] = field(default_factory=list)
    duplicated: list[Any] = field(default_factory=list)

    @property
    def trouble(self) -> list[Any]:
        return [*self.failed[:3], *self.missed[:3], *self.duplicated[:3]]


@contextmanager
def searching(project: Project, ids: Sequence[Id]) -> Iterator[Watch]:
    """Give an application that asks for the whole gallery again and again while the block runs."""
    watch, stop = Watch(), threading.Event()
    models = project.models()

    def go_on(client: rmvdb.Client) -> None:
        while not stop.is_set():
            try:
                hits = client.search(models.item(ids[watch.searches % len(ids)]), limit=len(ids) + 50)
            except Exception as exc:  # noqa: BLE001 (whatever it is, a search failed)
                watch.failed.append(repr(exc))
                continue
            time.sleep(0.1)  # the upgrade needs a share of the machine, too
            found = [hit.id for hit in hits]
            watch.searches += 1
            if missing := set(ids) - set(found):
                watch.missed.append((watch.searches, sorted(missing)[:5], len(missing)))
            if len(found) != len(set(found)):
                watch.duplicated.append(watch.searches)

    with pytest.MonkeyPatch.context() as patch, project.client() as client:
        patch.setattr("rmvdb.serving.search.ATTEMPTS", 25)  # on a slow machine a search is so slow that it is repeated
        thread = threading.Thread(target=go_on, args=(client,))
        thread.start()
        try:
            yield watch
        finally:
            stop.set()
            thread.join()
