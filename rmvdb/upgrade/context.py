"""The context that every step of an upgrade is given: leader, services and listeners."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rmvdb import errors
from rmvdb.backfill.hand import LOOK
from rmvdb.backfill.worker import Worker
from rmvdb.protocols import Classifier, Source, VectorStore
from rmvdb.registry.mark import Owner
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow, VersionRow
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.storage.archive import Archive
from rmvdb.storage.artifacts import Artifacts
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.text import RESUMABLE
from rmvdb.types import Index, ReportProgress


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """The services of a conductor."""

    registry: Registry
    store: VectorStore
    loaded_models: LoadedModels
    artifacts: Artifacts
    archive: Archive
    source: Source | None
    #: The embeddings kept for a model version.
    cache: Callable[[str], EmbeddingCache]
    classifier: Callable[[VersionRow], Classifier | None]
    #: The index of new collections.
    index: Index
    #: max_age, longest_search and staleness of every plan, in seconds.
    times: Mapping[str, float]
    #: The most records in a batch, and in a page that is read.
    batch: int
    #: Seconds that one call of the store may take.
    engine_timeout: float
    #: The folder for plans and for the sorting of orders.
    folder: Path
    #: Batches that a worker has in hand. A verification holds no more.
    width: int = 6
    #: The share of records that may be missing without a reason.
    missing: float = 0.01
    #: The days for which queries are kept.
    queries_days: float = 30.0
    #: Milliseconds that one search has for rescoring.
    rescore_ms: float = 100.0


def _silent(_: str) -> None:
    pass


class UpgradeContext:
    """Leads the upgrades of one gallery. The files beside this one hold functions of a context.

    `say` gets a sentence for each step, `announce` one before each wait, `report` the progress of a long step. Set `stop` to end
    it.
    """

    def __init__(
        self,
        gallery: str,
        services: Services,
        *,
        say: Callable[[str], None] = _silent,
        announce: Callable[[str], None] | None = None,
        report: ReportProgress = lambda *_: None,
        stop: threading.Event | None = None,
    ) -> None:
        self.services, self.say, self._announce, self.report = services, say, announce, report
        self.stop = stop or threading.Event()
        #: Seconds that it waits until a plan can come into force.
        self.patience = math.inf
        #: The token and the worker of its leadership, while it leads.
        self.leader_token: int | None = None
        self.worker: Worker | None = None
        #: The upgrade that it leads, while it leads one.
        self.leads: int | None = None
        #: Whether the last sentence about a pause was that it waits.
        self._paused = False
        #: The leader that it said it waits for.
        self.waits_for: str | None = None
        self.registry, self.store = services.registry, services.store
        self.owner = Owner(services.registry, services.store)
        self.gallery: GalleryRow = self.registry.gallery(gallery)
        if self.gallery.rebuilding:
            raise errors.RegistryError(
                f"The work on gallery {gallery!r} is being rebuilt; wait until rmvdb registry rebuild has ended, or run it again"
            )

    def check_stop(self, given_up: threading.Event | None = None) -> None:
        """Raise Stopped if it should stop, or if `given_up` is set. Wait while the upgrade that it leads is paused."""
        if self.stop.is_set() or (given_up is not None and given_up.is_set()):
            raise errors.Stopped(RESUMABLE)
        if self.leads is not None and self.registry.upgrade(self.leads).paused:
            self.wait_for_resume(self.leads, given_up)

    def wait_for_resume(self, upgrade: int, given_up: threading.Event | None = None) -> None:
        """Wait until the upgrade is no longer paused, or `given_up` is set.

        Raises:
            Paused: this worker has other galleries to work on.
            Stopped: it should stop.
            WrongPhase: the upgrade has ended meanwhile.
        """
        if self.worker is not None and not self.worker.patient:
            raise errors.Paused(f"Upgrade {upgrade} is paused; to continue, run rmvdb resume")
        while (row := self.registry.upgrade(upgrade)).paused:
            self.registry.refuse_ended(upgrade)
            if row.makes_way and self.registry.end_making_way(upgrade):
                continue
            self.hear_pause(True)
            if self.stop.wait(LOOK) or (given_up is not None and given_up.is_set()):
                raise errors.Stopped(RESUMABLE)
        self.hear_pause(False)

    def announce(self, words: str) -> None:
        """Say what it waits for."""
        (self._announce or self.say)(words)

    def hear_pause(self, paused: bool) -> None:
        """Say once that it waits for the end of a pause, and once that it goes on."""
        if paused != self._paused:
            self._paused = paused
            self.announce("paused; waiting for rmvdb resume" if paused else "no longer paused")

    def report_or_stop(self, step: str, done: int, total: int) -> None:
        """Report progress. Raise Stopped if it should stop."""
        self.check_stop()
        self.report(step, done, total)

    def report_if_slow(self) -> ReportProgress:
        """Return a function that checks for a stop and, from two seconds on, reports progress."""
        began = time.monotonic()

        def report(step: str, done: int, total: int) -> None:
            self.check_stop()
            if time.monotonic() - began > 2.0:
                self.report(step, done, total)

        return report

    def can_load(self, version: str) -> bool:
        """Whether the embedder of a version can be loaded. If not, say what follows."""
        try:
            self.services.loaded_models.embedder(self.services.loaded_models.chain(version).embedder)
        except errors.ModelError as exc:
            self.say(f"the embedder of {version} cannot be loaded ({exc}); records that clients write get ψ's vector")
            return False
        return True
