"""Settings in, wired objects out; the only place that chooses classes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmvdb import errors
from rmvdb.app import config, config_file
from rmvdb.app.settings import ProjectSettings
from rmvdb.items import sources
from rmvdb.items.objects import Allowed, leave_out, look_in
from rmvdb.registry import manifest
from rmvdb.registry.registry import Registry
from rmvdb.storage import files, ownership
from rmvdb.storage.folders import Folder, LocalFolder
from rmvdb.text import without_password
from rmvdb.timing import WRITE_LASTS

if TYPE_CHECKING:
    from rmvdb.backfill.worker import Worker
    from rmvdb.protocols import Classifier, Embedder, Source, VectorStore
    from rmvdb.registry.tables import VersionRow
    from rmvdb.serving.client import Client
    from rmvdb.serving.loaded_models import LoadedModels
    from rmvdb.serving.query_keeper import QueryKeeper
    from rmvdb.storage.embedding_cache import EmbeddingCache
    from rmvdb.upgrade.garbage import Collector
    from rmvdb.upgrade.rebuild import Rebuild
    from rmvdb.upgrade.run import Conductor


#: The environment variable for `[models] allow` of rmvdb.toml.
ALLOW = "RMVDB_MODELS__ALLOW"
#: Seconds for which a transaction of the registry, or a client, waits for a bucket: PostgreSQL ends one that is idle for ten.
BRIEFLY = 4.0


class App:
    """One configuration and the objects made of it. Each is made on first use, so that `status` never loads torch."""

    def __init__(self, settings: ProjectSettings, *, file: Path | None = None) -> None:
        self.settings, self.file = settings, file
        if file is not None:
            look_in(file.parent)  # so that commands and applications in folders below find its models, too

    @property
    def allowed(self) -> Allowed:
        """The modules whose code may run because the registry names it."""
        in_file = self.file is not None and not os.environ.get(ALLOW)
        return Allowed(modules=self.settings.models.allow, where=str(self.file) if in_file else ALLOW)

    def allow(self, modules: Iterable[str]) -> list[str]:
        """Let code of these modules run here, because the user named them. Return those that were not allowed yet.

        Raises ConfigError, with the line to write by hand, if rmvdb.toml cannot be changed.
        """
        before = self.allowed
        if not (new := [each for each in dict.fromkeys(modules) if not before.has(each)]):
            return []
        wanted = (*before.modules, *new)
        if self.file is None or before.where == ALLOW:
            raise errors.ConfigError(f"{new[0]!r} is not allowed yet; set {ALLOW} to {json.dumps(wanted)}")
        config_file.allow(self.file, wanted)
        models = self.settings.models.model_copy(update={"allow": wanted})
        self.settings = self.settings.model_copy(update={"models": models})
        return new

    def allow_registered(self) -> list[str]:
        """Allow the modules that the registry names, if rmvdb.toml allows none yet. Return those that were not allowed yet."""
        if "allow" in self.settings.models.model_fields_set or self.file is None:
            return []
        versions = [spec for row in self.registry.versions() for spec in (row.embedder, row.classifier) if spec]
        called = [code for row in self.registry.galleries() if (code := sources.code_of(row.source))]
        return self.allow(spec.partition(":")[0] for spec in (*versions, *called))

    def refuse_nowhere(self) -> None:
        """Raise ConfigError if there is no project here. A question must not create an empty registry."""
        home = self.settings.folder
        if not home.exists() and self.settings.registry.url.get_secret_value() == f"sqlite:///{home / 'registry.sqlite'}":
            raise errors.ConfigError(
                f"There is no registry in {str(home)!r}; go to the folder that has {config_file.NAME}, or make one: rmvdb init"
            )

    @property
    def _private(self) -> tuple[Path, ...]:
        """The files and folders that other users need not read."""
        database = self.settings.registry_file
        beside = [database.with_name(f"{database.name}{end}") for end in ("", "-wal", "-shm")] if database else []
        return self.settings.folder, self.settings.folder / manifest.NAME, *beside

    @property
    def open_to_others(self) -> list[Path]:
        """The private files that other users can read because an earlier rmvdb made them so. None if home is shared."""
        return (
            []
            if ownership.is_shared(self.settings.folder)
            else [path for path in self._private if ownership.open_to_others(path)]
        )

    def close_to_others(self) -> None:
        """Make home. Remove other users' rights to it, to the manifest and to the registry's files."""
        files.make_folder(self.settings.folder, "local" if self.settings.bucket else "home, or registry.url,")
        for path in self.open_to_others:
            ownership.close_to_others(path)

    @functools.cached_property
    def registry(self) -> Registry:
        """The registry. It writes each change to the manifest, too."""
        url = self.settings.registry.url.get_secret_value()
        return Registry(url, patience=self.settings.backfill.retry_for, keep=self.manifest.write)

    @property
    def manifest(self) -> manifest.Manifest:
        """The manifest, from which a lost registry is rebuilt."""
        return manifest.Manifest(self._home_briefly)

    @functools.cached_property
    def home(self) -> Folder:
        """The folder of manifest, archive and kept embeddings. A bucket is asked again for `backfill.retry_for`."""
        return self.home_within(self.settings.backfill.retry_for)

    @functools.cached_property
    def _home_briefly(self) -> Folder:
        """The same, for those who must not wait: a transaction that holds locks, and an application."""
        return self.home_within(BRIEFLY)

    def home_within(self, patience: float) -> Folder:
        """Return home. If it is in a bucket that does not answer, each call is made again for so many seconds."""
        from rmvdb.storage.bucket import Bucket

        return Bucket(self.settings.bucket, patience=patience) if self.settings.bucket else LocalFolder(self.settings.home)

    @functools.cached_property
    def store(self) -> VectorStore:
        """The vector engine: a Milvus server, or the server process of a Milvus Lite file that all processes here share."""
        from rmvdb.engines import lite
        from rmvdb.engines.milvus import MilvusStore

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
        if file.parent == self.settings.folder:  # the user makes any other folder
            files.make_folder(file.parent, "home")
        return make(functools.partial(lite.address, file), gate=functools.partial(lite.gate, file))

    @functools.cached_property
    def loaded_models(self) -> LoadedModels:
        """Embedders, heads and transforms by name, each loaded once."""
        from rmvdb.serving.loaded_models import LoadedModels

        return LoadedModels(
            load_embedder=self.embedder,
            load_chain=self._chain,
            load_artifact=self.artifacts.get,
            import_embedder=self._import_embedder,
            load_digests=lambda: {row.name: row.digest for row in self.registry.versions()},
            check_embedder=self._check_embedder,
        )

    @functools.cached_property
    def artifacts(self) -> Any:
        """The files that rmvdb made and reads back."""
        from rmvdb.storage.artifacts import Artifacts

        return Artifacts(self.settings.artifacts, elsewhere=self.registry.contents_of, bucket=self._artifacts_in_bucket)

    def _artifacts_in_bucket(self) -> Folder | None:
        return self.home.folder("artifacts") if self.settings.bucket else None

    def share_artifacts(self) -> None:
        """Give the registry the contents of artifacts that it lacks and home has. Give a bucket those that it lacks."""
        for sha256, data in self.artifacts.here(self.registry.artifacts_without_contents()):
            self.registry.add_contents(sha256, data)
        registered = {row.sha256: row.suffix for row in self.registry.artifacts()}
        for sha256 in self.artifacts.lacking(registered):
            with contextlib.suppress(errors.ArtifactError):  # nothing has it any more
                self.artifacts.put(self.artifacts.get(sha256), suffix=registered[sha256])

    @property
    def times(self) -> dict[str, float]:
        """The waiting times of every new serving plan, in seconds."""
        search = self.settings.search
        return {"max_age": search.plan_max_age, "longest_search": search.longest_search, "staleness": self.store.staleness}

    @property
    def quiet(self) -> float:
        """Seconds after which no write or claim of a lost registry is still under way."""
        return max(WRITE_LASTS, self.settings.backfill.lease)

    def embedder(self, version: str) -> Embedder:
        """Return the embedder of a registered version. Raise ModelError if it is not the registered model."""
        from rmvdb.catalog.versions import check_model
        from rmvdb.items.load import load_embedder
        from rmvdb.items.pictures import pixel_limit

        pixel_limit.most = self.settings.items.max_pixels
        row = self.registry.version(version)
        embedder = load_embedder(row.embedder, row.options, allowed=self.allowed)
        check_model(row, embedder)
        return embedder

    def _check_embedder(self, version: str, embedder: Embedder) -> None:
        from rmvdb.catalog.versions import check_probes

        check_probes(self.registry.version(version), embedder)

    def _import_embedder(self, version: str) -> Any:
        from rmvdb.items.objects import load_object

        return load_object(self.registry.version(version).embedder, error=errors.ModelError, allowed=self.allowed)

    def _chain(self, version: str) -> Any:
        from rmvdb.serving.loaded_models import Chain

        row = self.registry.version(version)
        return Chain(embedder=row.base or row.name, dim=row.dim, head=row.head, has_own_queries=row.has_own_queries)

    def classifier(self, row: VersionRow) -> Classifier | None:
        """Return the classifier of a version, or None if it declares none."""
        if not row.classifier:
            return None
        from rmvdb.items.load import load_classifier

        return load_classifier(row.classifier, allowed=self.allowed)

    def source(self, gallery: str) -> Source | None:
        """Return the source of a gallery's items, or None if it has none."""
        spec = self.registry.gallery(gallery).source
        return sources.load(spec, base=self.base, allowed=self.allowed) if spec else None

    @property
    def milvus_shown(self) -> str:
        """Where the vectors are, without a password."""
        return without_password(self.settings.milvus.uri)

    @property
    def base(self) -> Path:
        """The folder of rmvdb.toml, where relative paths in sources start."""
        return self.file.absolute().parent if self.file else Path.cwd()

    def gallery_name(self, name: str | None, *, how: str = "--gallery") -> str:
        """Return the named gallery, or the only one. Raise UsageError if there are several. `how` says how to name one."""
        if name:
            return self.registry.gallery(name).name
        names = [row.name for row in self.registry.galleries()]
        if len(names) == 1:
            return names[0]
        if not names:
            self.manifest.check_forgotten()
            raise errors.UsageError("There is no gallery yet; make one: rmvdb gallery add NAME --model VERSION")
        raise errors.UsageError(f"There are {len(names)} galleries; name one with {how}: {', '.join(names[:8])}")

    def close(self) -> None:
        """Close all connections."""
        for part in ("registry", "store"):
            if part in self.__dict__:
                self.__dict__.pop(part).close()

    def client(self, gallery: str | None = None, *, closing: Callable[[], None] = lambda: None) -> Client:
        """Return a client of a gallery. Its `close` calls `closing`."""
        from rmvdb.registry.codec import schema_from_json
        from rmvdb.serving.client import Client
        from rmvdb.serving.rescorer import Rescorer
        from rmvdb.serving.shared_vectors import SharedVectors

        name = self.gallery_name(gallery, how="connect(gallery=…)")
        row, search = self.registry.gallery(name), self.settings.search
        cache = int(search.rescore_cache_mb * 1e6)
        embeddings = functools.cache(functools.partial(self._embeddings, name, home=self._home_briefly))
        shared = SharedVectors(name, registry=self.registry, store=self.store, cache=embeddings, most=2 * cache)
        rescorer = Rescorer(
            loaded_models=self.loaded_models,
            source=functools.partial(self.source, name),
            schema=schema_from_json(self.registry.collections(row.id)[0].schema),
            budget=search.rescore_ms / 1000,
            cache=cache,
            shared=shared,
        )
        keeper = self._keeper(name)
        try:
            return Client(
                name,
                item_field=sources.field_of(row.source),
                registry=self.registry,
                store=self.store,
                loaded_models=self.loaded_models,
                engine_timeout=self.settings.milvus.timeout,
                consistency=self.settings.search.consistency,
                keeper=keeper,
                closing=closing,
                rescorer=rescorer,
            )
        except BaseException:
            if keeper is not None:
                keeper.close()
            raise

    def _keeper(self, gallery: str) -> QueryKeeper | None:
        """Return the keeper of a client's sample of queries, or None if the settings keep none."""
        from rmvdb.serving.query_keeper import QueryKeeper

        search = self.settings.search
        if not search.keep_queries:
            return None
        return QueryKeeper(gallery, registry=self.registry, most=search.keep_queries, days=search.keep_queries_days)

    def worker(self) -> Worker:
        """Return a worker with this configuration's lease, width and limits."""
        from rmvdb.backfill.throttle import Limits
        from rmvdb.backfill.worker import Worker

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
        announce: Callable[[str], None] | None = None,
        report: Callable[[str, int, int], None] = lambda *_: None,
        stop: threading.Event | None = None,
    ) -> Conductor:
        """Return a conductor of a gallery's upgrades. Without `announce`, `say` gets the sentences about waiting, too."""
        from rmvdb.storage.archive import Archive
        from rmvdb.upgrade.context import Services
        from rmvdb.upgrade.run import Conductor

        name = self.gallery_name(gallery)
        self.loaded_models.refresh()  # a worker lives for months
        services = Services(
            registry=self.registry,
            store=self.store,
            loaded_models=self.loaded_models,
            artifacts=self.artifacts,
            archive=Archive(self.home.folder("archive")),
            source=self.source(name),
            cache=functools.partial(self._embeddings, name),
            classifier=self.classifier,
            index=self.settings.index_for(name),
            times=self.times,
            batch=self.settings.backfill.batch,
            width=self.settings.backfill.width,
            engine_timeout=self.settings.milvus.timeout,
            folder=self.settings.cache,
            missing=self.settings.backfill.missing,
            queries_days=self.settings.search.keep_queries_days,
            rescore_ms=self.settings.search.rescore_ms,
        )
        return Conductor(name, services, say=say, announce=announce, report=report, stop=stop)

    def _embeddings(self, gallery: str, version: str, *, home: Folder | None = None) -> EmbeddingCache:
        """Return the embeddings kept for a gallery and a version, but not those of an earlier version of the same name."""
        from rmvdb.storage.embedding_cache import EmbeddingCache

        row = self.registry.version(version)
        name = f"{gallery}-{version}-{row.digest[:12]}"
        folder = (home or self.home).folder("cache").folder("embeddings")
        return EmbeddingCache(folder, model=name, dim=row.dim)

    def collector(self) -> Collector:
        """Return the collector of leftover rows and files."""
        from rmvdb.upgrade.garbage import Collector

        return Collector(
            registry=self.registry,
            manifest=self.manifest,
            artifacts=[LocalFolder(self.settings.artifacts), *([self.home.folder("artifacts")] if self.settings.bucket else [])],
            archive=self.home.folder("archive"),
            caches=[self.home.folder("cache"), *([LocalFolder(self.settings.cache)] if self.settings.bucket else [])],
            plans=LocalFolder(self.settings.cache / "plans"),
            queries_days=self.settings.search.keep_queries_days,
        )

    def rebuild(
        self,
        *,
        say: Callable[[str], None] = lambda _: None,
        report: Callable[[str, int, int], None] = lambda *_: None,
        stop: threading.Event | None = None,
    ) -> Rebuild:
        """Return the service that rebuilds a lost registry."""
        from rmvdb.storage.archive import Archive
        from rmvdb.upgrade.rebuild import Rebuild

        return Rebuild(
            registry=self.registry,
            store=self.store,
            archive=Archive(self.home.folder("archive")),
            manifest=self.manifest,
            lock=self.settings.folder / f"{manifest.NAME}.rebuilding",
            quiet=self.quiet,
            search=lambda gallery: self.settings.index_for(gallery).search,
            say=say,
            report=report,
            stop=stop,
        )


def load(path: Path | None = None, *, trust: bool = False, how: str = "trust=True") -> App:
    """Return the app of the configuration at `path`, of RMVDB_CONFIG, or of the nearest rmvdb.toml. `trust` accepts one that
    other users may change. `how` says how this caller is told to trust."""
    settings, file = config.load(path, trust=trust, how=how), config_file.find(path)
    for folder in (Path(), file.parent if file else Path()):  # /tmp passes for rmvdb.toml, not for modules
        if ownership.is_shared(folder) and not (trust or ownership.is_trusted(folder)):
            leave_out(folder.absolute())
    return App(settings, file=file)
