"""A worker that stays, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

from rmvdb.app.daemon import Scheduler
from rmvdb.app.window import Window
from rmvdb.backfill.throttle import Limits
from rmvdb.storage.artifacts import Artifacts
from rmvdb.storage.embedding_cache import EmbeddingCache
from rmvdb.storage.folders import LocalFolder
from rmvdb.types import Index
from rmvdb.upgrade.context import Services
from rmvdb.upgrade.run import Conductor
from tests.support.inprocess import UNLIMITED, Gallery


@contextmanager
def at_work(
    gallery: Gallery, *, limits: Limits = UNLIMITED, lease: float = 1.6, galleries: Sequence[str] = ()
) -> Iterator[list[str]]:
    """Run a worker that stays, at these galleries or all. Give its lines."""
    said, stop = list[str](), threading.Event()
    worker = gallery.worker(limits=limits, lease=lease)

    def conductor(name: str, **options: object) -> Conductor:
        services = Services(
            registry=gallery.registry, store=gallery.store, loaded_models=gallery.loaded_models, archive=gallery.archive,
            artifacts=Artifacts(gallery.folder / "artifacts"), source=gallery.source,
            cache=lambda version: EmbeddingCache(LocalFolder(gallery.folder), model=version), classifier=lambda row: None,
            index=Index(type="FLAT"), times=gallery.times, batch=10, engine_timeout=1.0, folder=gallery.folder / "cache",
        )  # fmt: skip
        return Conductor(name, services, **options)  # type: ignore[arg-type]

    settings = SimpleNamespace(backfill=SimpleNamespace(lease=lease))
    app = SimpleNamespace(
        registry=gallery.registry, store=gallery.store, conductor=conductor, worker=lambda: worker, settings=settings
    )
    scheduler = Scheduler(app, galleries=galleries, window=Window(None), say=said.append)  # type: ignore[arg-type]
    thread = threading.Thread(target=scheduler.run, args=(stop,))
    thread.start()
    try:
        yield said
    finally:
        stop.set()
        thread.join(30.0)
    assert not thread.is_alive()
