"""Settings in, wired objects out; the only place that chooses classes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmvdb import config, errors, files
from rmvdb.deadlines import WRITE_LASTS
from rmvdb.manifest import Manifest
from rmvdb.registry import Registry

if TYPE_CHECKING:
    from rmvdb.archive import EmbeddingCache
    from rmvdb.client import Client
    from rmvdb.encoding import Encoder
    from rmvdb.protocols import Classifier, Embedder, Source, VectorStore
    from rmvdb.rebuild import Rebuild
    from rmvdb.tables import VersionRow
    from rmvdb.upgrade import Conductor
    from rmvdb.worker import Worker


class App:
    """One configuration and what is made of it, each part when it is first asked for: `status` never loads torch."""

    def __init__(self, settings: config.Settings) -> None:
        self.settings = settings

    def refuse_nowhere(self) -> None:
        """ConfigError where nothing of rmvdb is: asking must not make an empty registry."""
        home = self.settings.home
        if not home.exists() and self.settings.registry.url.get_secret_value() == f"sqlite:///{home / 'registry.sqlite'}":
            raise errors.ConfigError(
                f"There is no registry in {str(home)!r}; go to the folder that has {config.NAME}, or make one: rmvdb init"
            )

    @functools.cached_property
    def registry(self) -> Registry:
        """The registry, whose changes are in the manifest."""
        url = self.settings.registry.url.get_secret_value()
        return Registry(url, patience=self.settings.backfill.retry_for, keep=self.manifest.write)

    @property
    def manifest(self) -> Manifest:
        """What brings back a lost registry."""
        return Manifest(self.settings.manifest)

    @functools.cached_property
    def store(self) -> VectorStore:
        """The vector engine: a Milvus server, or the server process of a Milvus Lite file that all processes here share."""
        from rmvdb import lite
        from rmvdb.milvus import MilvusStore

        milvus = self.settings.milvus
        make = functools.partial(
            MilvusStore,
            token=milvus.token.get_secret_value(),
            timeout=milvus.timeout,
            staleness=milvus.staleness,
            patience=self.settings.backfill.retry_for,
        )
        if "://" in milvus.uri or milvus.uri.startswith("unix:"):
            return make(lambda: milvus.uri)
        file = Path(milvus.uri)
        if file.parent == self.settings.home:  # any other folder is its owner's to make
            files.make_folder(file.parent, "home")
        return make(functools.partial(lite.address, file), gate=functools.partial(lite.gate, file))

    @functools.cached_property
    def encoder(self) -> Encoder:
        """Embedders, heads and transforms by name, each loaded once."""
        from rmvdb.encoding import Encoder

        return Encoder(
            load_embedder=self.embedder,
            load_chain=self._chain,
            load_artifact=self.artifacts.get,
            import_embedder=self._import_embedder,
            load_digests=lambda: {row.name: row.digest for row in self.registry.versions()},
        )

    @functools.cached_property
    def artifacts(self) -> Any:
        """The files that rmvdb made and reads back."""
        from rmvdb.artifacts import Artifacts

        return Artifacts(self.settings.artifacts)

    @property
    def times(self) -> dict[str, float]:
        """The waiting times of every new serving plan, in seconds."""
        search = self.settings.search
        return {"max_age": search.plan_max_age, "longest_search": search.longest_search, "staleness": self.store.staleness}

    def embedder(self, version: str) -> Embedder:
        """The embedder of a registered version, its weights compared with those that were registered."""
        from rmvdb import embedders

        row = self.registry.version(version)
        embedder = embedders.load(row.embedder, row.options)
        if row.fingerprint and (found := embedders.fingerprint(embedder)) != row.fingerprint:
            raise errors.ModelError(
                f"The weights of model version {version!r} are not those that were registered (SHA-256 {str(found)[:12]}…, not "
                f"{row.fingerprint[:12]}…); put them back, or register the new ones as a version of their own"
            )
        return embedder

    def _import_embedder(self, version: str) -> Any:
        from rmvdb import embedders

        return embedders.load_object(self.registry.version(version).embedder, error=errors.ModelError)

    def _chain(self, version: str) -> Any:
        from rmvdb.encoding import Chain

        row = self.registry.version(version)
        return Chain(embedder=row.base or row.name, dim=row.dim, head=row.head)

    def classifier(self, row: VersionRow) -> Classifier | None:
        """The classifier of a version, where it declares one."""
        if not row.classifier:
            return None
        from rmvdb import embedders

        return embedders.load_classifier(row.classifier)

    def source(self, gallery: str) -> Source | None:
        """Where a gallery's items come from, where it has a source."""
        from rmvdb import sources

        spec = self.registry.gallery(gallery).source
        return sources.load(spec, base=self.base) if spec else None

    @property
    def base(self) -> Path:
        """The folder that relative paths in sources start at: that of rmvdb.toml."""
        return self.settings.home.parent

    def gallery_name(self, asked: str | None) -> str:
        """The gallery that was named, or the only one there is."""
        if asked:
            return self.registry.gallery(asked).name
        names = [row.name for row in self.registry.galleries()]
        if len(names) == 1:
            return names[0]
        if not names:
            self.manifest.check_forgotten()
            raise errors.UsageError("There is no gallery yet; make one: rmvdb gallery add NAME --model VERSION")
        raise errors.UsageError(f"There are {len(names)} galleries; name one with --gallery: {', '.join(names[:8])}")

    def close(self) -> None:
        """Give back the connections that were opened."""
        for part in ("registry", "store"):
            if part in self.__dict__:
                self.__dict__.pop(part).close()

    def client(self, gallery: str | None = None, *, closing: Callable[[], None] = lambda: None) -> Client:
        """A client of a gallery, which calls `closing` when it is closed."""
        from rmvdb.client import Client

        return Client(
            self.gallery_name(gallery),
            registry=self.registry,
            store=self.store,
            encoder=self.encoder,
            longest_call=self.settings.milvus.timeout,
            consistency=self.settings.search.consistency,
            traffic=self.settings.search.traffic,
            closing=closing,
        )

    def worker(self) -> Worker:
        """A worker with this configuration's lease, width and limits."""
        from rmvdb.throttle import Limits
        from rmvdb.worker import Worker

        backfill, throttle = self.settings.backfill, self.settings.throttle
        return Worker(
            registry=self.registry,
            lease=backfill.lease,
            longest_call=backfill.longest_call,
            width=backfill.width,
            limits=Limits(rate=throttle.rate, nice=throttle.nice, p99_ms=throttle.p99_ms, flag=throttle.flag),
        )

    def conductor(
        self,
        gallery: str | None = None,
        *,
        say: Callable[[str], None] = lambda _: None,
        report: Callable[[str, int, int], None] = lambda *_: None,
        stop: threading.Event | None = None,
    ) -> Conductor:
        """A conductor of a gallery's upgrades."""
        from rmvdb.archive import Archive
        from rmvdb.upgrade import Conductor, Hands

        name = self.gallery_name(gallery)
        self.encoder.refresh()  # a worker lives for months
        hands = Hands(
            registry=self.registry,
            store=self.store,
            encoder=self.encoder,
            artifacts=self.artifacts,
            archive=Archive(self.settings.archive),
            source=self.source(name),
            cache=functools.partial(self._embeddings, name),
            classifier=self.classifier,
            index=self.settings.index_for(name),
            times=self.times,
            batch=self.settings.backfill.batch,
            longest_call=self.settings.milvus.timeout,
            folder=self.settings.cache,
        )
        return Conductor(name, hands, say=say, report=report, stop=stop)

    def _embeddings(self, gallery: str, version: str) -> EmbeddingCache:
        """Those kept of a gallery by one version: not by another that had its name once."""
        from rmvdb.archive import EmbeddingCache

        name = f"{gallery}-{version}-{self.registry.version(version).digest[:12]}"
        return EmbeddingCache(self.settings.cache / "embeddings", model=name)

    def rebuild(
        self,
        *,
        say: Callable[[str], None] = lambda _: None,
        report: Callable[[str, int, int], None] = lambda *_: None,
        stop: threading.Event | None = None,
    ) -> Rebuild:
        """What brings back a lost registry."""
        from rmvdb.archive import Archive
        from rmvdb.rebuild import Rebuild

        return Rebuild(
            registry=self.registry,
            store=self.store,
            archive=Archive(self.settings.archive),
            manifest=self.manifest,
            quiet=max(WRITE_LASTS, self.settings.backfill.lease),
            search=lambda gallery: self.settings.index_for(gallery).search,
            say=say,
            report=report,
            stop=stop,
        )


def load(path: Path | None = None) -> App:
    """The app of the configuration at `path`, of RMVDB_CONFIG, or of the nearest rmvdb.toml."""
    return App(config.load(path))
