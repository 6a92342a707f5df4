"""Check every part and say how to fix each failure. Nothing is changed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rmvdb import errors
from rmvdb.app.wiring import App
from rmvdb.catalog.checks import check_unchanged, check_vectors, say_unsettled
from rmvdb.engines import index_rules
from rmvdb.items import sources
from rmvdb.items.query_embedder import has_own_queries
from rmvdb.registry import schema
from rmvdb.registry.mark import Owner
from rmvdb.registry.tables import CollectionRow, GalleryRow, VersionRow
from rmvdb.storage.ownership import is_shared
from rmvdb.text import counted
from rmvdb.types import Metric, Phase
from rmvdb.upgrade.status import behind

#: The number of records for which a source must have items.
ASKED = 5
#: The finding for a model that got its `embed_queries` after its registration.
UNUSED = (
    "; it has got embed_queries since it was registered, but embed still embeds its queries: to use embed_queries, register the "
    "model as a version of its own"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One part, and how it is."""

    part: str
    ok: bool
    #: The finding: a fact, or the failure and its remedy.
    detail: str

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return asdict(self)


def examine(app: App) -> Iterator[Finding]:
    """Check the configuration, the registry, the engine, every model version and every gallery. Yield one finding at a time."""
    if (nowhere := _look("project", lambda: _project(app))) and not nowhere.ok:
        yield nowhere  # looking further would make the folder of a project that is not there
        return
    registry = _look("registry", lambda: _registry(app))
    yield registry
    yield _look("files", lambda: _files(app, with_artifacts=registry.ok))
    engine = _look("engine", lambda: app.store.version())
    yield engine
    if not registry.ok:
        return
    version_text = engine.detail if engine.ok else ""
    needed = _needed(app)
    for version in app.registry.versions():
        if version.name not in needed:
            yield _look(f"model {version.name}", lambda version=version: _former(app, version))  # type: ignore[misc]
            continue
        yield _look(f"model {version.name}", lambda version=version: _model(app, version))  # type: ignore[misc]
    if not app.registry.galleries():
        yield _look("index", lambda: _new_index(app, version_text))
    for name in app.settings.indexes.keys() - {gallery.name for gallery in app.registry.galleries()}:
        yield _look(f"indexes.{name}", lambda name=name: app.registry.gallery(name).name)  # type: ignore[misc]
    for gallery in app.registry.galleries():
        yield _look(f"gallery {gallery.name}: index", lambda gallery=gallery: _index(app, gallery, version_text))  # type: ignore[misc]
        if engine.ok:
            yield _look(f"gallery {gallery.name}: owner", lambda gallery=gallery: _owner(app, gallery))  # type: ignore[misc]
            for row in app.registry.collections(gallery.id):
                if row.dropped_at is None:
                    yield _look(f"collection {row.name}", partial(_collection, app, row, gallery.name))
            yield _look(f"gallery {gallery.name}: source", lambda gallery=gallery: check_source(app, gallery))  # type: ignore[misc]


def _look(part: str, examine_it: Callable[[], str]) -> Finding:
    try:
        return Finding(part=part, ok=True, detail=examine_it())
    except errors.RmvdbError as exc:
        return Finding(part=part, ok=False, detail=str(exc))
    except Exception as exc:  # noqa: BLE001 (user code may raise anything, and a doctor does not die of it)
        return Finding(part=part, ok=False, detail=f"{type(exc).__name__}: {exc}")


def _project(app: App) -> str:
    app.refuse_nowhere()
    return str(app.settings.folder)


def _registry(app: App) -> str:
    schema.check(app.settings.registry.url.get_secret_value())
    if not app.registry.galleries():
        app.manifest.check_forgotten()
    return "; ".join([f"{app.registry.shown_url}, schema {schema.head()}", *app.registry.concerns()])


def _files(app: App, *, with_artifacts: bool) -> str:
    if not app.settings.folder.is_dir():
        raise errors.ArtifactError(f"{app.settings.folder} is not there; mount it, or correct home")
    if readable := app.open_to_others:
        return f"other users may read {', '.join(map(str, readable))}: rmvdb db upgrade takes that right away"
    shared = is_shared(app.settings.folder)
    local = f"{app.settings.folder} {'can be changed by other users' if shared else 'is closed to other users'}"
    for sha256 in _of_plans(app) if with_artifacts else ():
        app.artifacts.get(sha256)  # raises the error that names the file
    if not os.access(app.settings.folder, os.W_OK):
        local += ", but this user cannot write there, as plans, upgrades and workers must"
    return f"{local}; {_bucket(app, app.settings.bucket)}" if app.settings.bucket else local


def _of_plans(app: App) -> set[str]:
    """Return the transforms and calibrations of the plans in force."""
    legs = [leg for gallery in app.registry.galleries() for leg in app.registry.plan(gallery.name).write_targets]
    transforms = {each for leg in legs for each in (*leg.transforms, *(leg.blend.transforms if leg.blend else ()))}
    return transforms | {leg.calibration for leg in legs if leg.calibration}


def _needed(app: App) -> set[str]:
    """Return the versions that a plan in force or an upgrade under way needs, and those that no gallery has had yet."""
    needed, had = set[str](), set[str]()
    for gallery in app.registry.galleries():
        for leg in app.registry.plan(gallery.name).write_targets:
            needed |= {leg.model, leg.embedder, leg.write_with or leg.model, leg.blend.embedder if leg.blend else leg.model}
        for upgrade in app.registry.upgrades(gallery.id):
            versions = {upgrade.from_version, upgrade.to_version}
            needed |= versions if upgrade.phase != Phase.ENDED else set()
            had |= versions
    bases = {row.name: row.base for row in app.registry.versions() if row.base}
    needed |= {bases[name] for name in needed if name in bases}
    had |= {bases[name] for name in had if name in bases}
    return needed | ({row.name for row in app.registry.versions()} - had)


def _former(app: App, row: VersionRow) -> str:
    """Look at a version that only the history of a gallery has. Its code may be gone."""
    try:
        return _model(app, row)
    except errors.RmvdbError as exc:
        return f"no gallery needs it any more, and it cannot be loaded: {exc}"


def _bucket(app: App, address: str) -> str:
    """Write, list, read and remove a file there, since each is a right of its own."""
    name, home = f"doctor-{uuid.uuid4().hex}", app.home_within(0)
    home.write(f"{name}/file", b"rmvdb")
    if not home.has(name) or home.read(f"{name}/file") != b"rmvdb":
        raise errors.ArtifactError(f"{address} does not give back what was just written; look whether it is one S3 server")
    home.clear(name)
    return f"{address} can be listed, read, written and cleared"


def _model(app: App, row: VersionRow) -> str:
    embedder = app.embedder(row.base or row.name)  # its own check names the difference
    if row.head:
        app.artifacts.get(row.head)
    if row.classifier:
        app.classifier(row)
    unused = UNUSED if has_own_queries(embedder) and not row.has_own_queries else ""
    if row.probes is None:
        return f"{row.embedder} loads; its dimension could not be probed{unused}"
    return f"{row.embedder} loads, gives dimension {row.dim}, and is the model that was registered{unused}"


def _owner(app: App, gallery: GalleryRow) -> str:
    Owner(app.registry, app.store).expect(gallery.name)
    if trouble := behind(gallery.epoch, app.registry.trace(gallery.name).reported):
        raise errors.NotOwner(trouble)
    return f"owned by {app.registry.shown_url}"


def _index(app: App, gallery: GalleryRow, engine: str) -> str:
    chosen = app.settings.index_for(gallery.name)
    held = app.registry.version(app.registry.plan(gallery.name).legs[0].model)
    index_rules.check(chosen, dim=held.dim, metric=Metric(held.metric).stored, engine=engine)
    return f"{chosen.type} for new collections"


def _new_index(app: App, engine: str) -> str:
    chosen = app.settings.index.value()
    vectors: set[tuple[int | None, Metric | None]] = {(row.dim, Metric(row.metric).stored) for row in app.registry.versions()}
    for dim, metric in vectors or {(None, None)}:
        index_rules.check(chosen, dim=dim, metric=metric, engine=engine)
    return f"{chosen.type} for new collections"


def _collection(app: App, row: CollectionRow, gallery: str) -> str:
    shape, segments = check_unchanged(app.store, row), app.store.segments(row.name)
    if not segments.searchable:
        raise errors.EngineError(
            f"{segments.waiting} of {counted(segments.rows, 'row')} wait for their index, and searches with a filter may miss "
            "them until they have it; if that lasts for longer than minutes, look at Milvus' index nodes"
        )
    described = f"{counted(app.store.count(row.name), 'record')}, {shape.dim} dimensions, {shape.metric}"
    if unsettled := say_unsettled(app.store, row.name, gallery):
        return f"{described}; {unsettled}"
    if not segments.partly:
        return described
    return (
        f"{described}; {counted(segments.partly, 'row')} in segments of 663 to 1,023 rows, for which Milvus makes no index: a "
        "search with a filter may miss some of them until Milvus merges these segments"
    )


def check_source(app: App, gallery: GalleryRow) -> str:
    """Return how many records of a gallery are what their model makes of their items, in words.

    Raises SourceError if the source has no item of one of the records, ModelError if none can be embedded, Mismatch if they
    differ.
    """
    source = app.source(gallery.name)
    if source is None:
        raise errors.SourceError(f"Gallery {gallery.name!r} has no source of items; rmvdb gallery source {gallery.name} SPEC")
    shown = sources.shown(str(gallery.source))
    leg = app.registry.plan(gallery.name).legs[-1]
    records = next(app.store.scan(leg.collection, fields=None, page=ASKED), [])
    if not records:
        return f"{shown}; the gallery is empty, so no item was loaded"
    items, failed = sources.given(source, records)
    if failed:
        raise errors.SourceError(next(iter(failed.values())))
    if missing := [record.id for record in records if record.id not in items]:
        raise errors.SourceError(
            f"{shown} has no item of {len(missing)} of {counted(len(records), 'record')}, such as {missing[0]!r}; "
            f"add them there, or correct the source: rmvdb gallery source {gallery.name} SPEC"
        )
    return f"{shown} gives items; {check_vectors(app.registry, app.store, app.loaded_models, gallery, source)}"
