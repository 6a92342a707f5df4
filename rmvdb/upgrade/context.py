"""What every step of an upgrade is given: who leads it, with which services, and who hears of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rmvdb import errors
from rmvdb.backfill.worker import LOOK, Worker
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
    """The services that a conductor works with."""

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
    #: max_age, longest_search, staleness of every plan, in seconds.
    times: Mapping[str, float]
    #: Most records in a batch, and in a page of what is read.
    batch: int
    #: Seconds that one call of the store may take.
    engine_timeout: float
    #: Where plans are kept, and where orders are sorted.
    folder: Path
    #: The share of records that may be gone without a reason.
    missing: float = 0.01


def _silent(_: str) -> None:
    pass


class UpgradeContext:
    """Who leads the upgrades of one gallery; the files beside this one hold functions of a context.

    `say` hears each step in a sentence, `report` how far a long one is; `stop` is set to end both.
    """

    def __init__(
        self,
        gallery: str,
        services: Services,
        *,
        say: Callable[[str], None] = _silent,
        report: ReportProgress = lambda *_: None,
        stop: threading.Event | None = None,
    ) -> None:
        self.services, self.say, self.report = services, say, report
        self.stop = stop or threading.Event()
        #: Seconds for which it waits until a plan can come into force.
        self.patience = math.inf
        #: The token that it leads by, and the worker for whom, while it does.
        self.leader_token: int | None = None
        self.worker: Worker | None = None
        #: The upgrade that it leads, while it does.
        self.leads: int | None = None
        #: Whether it has said last that it waits for the end of a pause.
        self._paused = False
        #: Whose leadership it has said last that it waits for.
        self.waits_for: str | None = None
        self.registry, self.store = services.registry, services.store
        self.owner = Owner(services.registry, services.store)
        self.gallery: GalleryRow = self.registry.gallery(gallery)
        if self.gallery.rebuilding:
            raise errors.RegistryError(
                f"The work on gallery {gallery!r} is being rebuilt; wait until rmvdb registry rebuild has ended, or run it again"
            )

    def check_stop(self) -> None:
        """Raise Stopped once it shall stop; while the upgrade that it leads is paused, wait."""
        if self.stop.is_set():
            raise errors.Stopped(RESUMABLE)
        if self.leads is not None and self.registry.upgrade(self.leads).paused:
            self.wait_for_resume(self.leads)

    def wait_for_resume(self, upgrade: int) -> None:
        """Wait until the upgrade is no longer paused.

        Raises:
            Paused: this worker has other galleries to work on.
            WrongPhase: the upgrade has ended meanwhile.
        """
        if self.worker is not None and not self.worker.patient:
            raise errors.Paused(f"Upgrade {upgrade} is paused; go on with: rmvdb resume")
        while self.registry.upgrade(upgrade).paused:
            self.registry.refuse_ended(upgrade)
            self.hear_pause(True)
            if self.stop.wait(LOOK):
                raise errors.Stopped(RESUMABLE)
        self.hear_pause(False)

    def hear_pause(self, paused: bool) -> None:
        """Say once that it waits, and once that it goes on."""
        if paused != self._paused:
            self._paused = paused
            self.say("paused; waiting for rmvdb resume" if paused else "no longer paused")

    def report_or_stop(self, step: str, done: int, total: int) -> None:
        """As `report`; raises Stopped once it shall stop."""
        self.check_stop()
        self.report(step, done, total)

    def can_load(self, version: str) -> bool:
        """Whether the embedder of a version can be loaded; says what that means where it cannot."""
        try:
            self.services.loaded_models.embedder(self.services.loaded_models.chain(version).embedder)
        except errors.ModelError as exc:
            self.say(f"the embedder of {version} cannot be loaded ({exc}); records written since keep ψ's vector")
            return False
        return True
