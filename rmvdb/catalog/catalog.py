"""Registers model versions and galleries, and looks at each before it is believed."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rmvdb import errors
from rmvdb.engines import index_rules
from rmvdb.items import embedders, sources
from rmvdb.learning import hyperbolic
from rmvdb.protocols import Embedder, Source, VectorStore
from rmvdb.registry.codec import schema_from_json
from rmvdb.registry.mark import BEYOND, Owner, is_mark
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import CollectionRow, GalleryRow, VersionRow
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.text import counted
from rmvdb.types import Field, IdType, Index, Metric, Record, Schema, Vectors

if TYPE_CHECKING:
    from rmvdb.items.embedders import Kind

#: What probe items there are.
KINDS: tuple[Kind, ...] = ("text", "image")
#: Records that are embedded again to see whether a collection's vectors are the model's.
LOOKED_AT = 8
#: Characters of a collection's name before its last part; Milvus takes 255 in all.
LONGEST_NAME = 200
#: What a record has besides its fields, by the names that `Client.upsert` takes them by.
TAKEN = {"id", "item"}
#: What `check_vectors` says if the source has no item for any record that it looked at.
UNCOMPARED = "no vector could be compared"
#: Cosine distance up to which vectors that another program made, perhaps in half precision, are taken for the model's.
AGREES = 1e-3


def add_version(
    registry: Registry,
    *,
    name: str,
    spec: str,
    options: Mapping[str, Any],
    classifier: str | None,
    metric: Metric,
    dim: int | None,
    kind: Kind | None,
    compatible_with: str | None = None,
) -> VersionRow:
    """Load the embedder, measure its dimension on probe items, fingerprint its weights, register it.

    Raises ModelError where it, or the classifier, cannot be loaded or used, Mismatch where its dimension is not the promised one
    or it cannot be `compatible_with` that one, AlreadyExists for a name that means something else. The same again is no error.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise errors.UsageError(f"{name!r} is no name for a model version; use letters, digits, '.', '_' and '-'")
    embedder = embedders.load(spec, options)
    kind, probes, failures = probe(embedder, kind=kind)
    if probes is None and dim is None:
        told = {str(failure): f"{each}s: {failure}" for each, failure in failures.items()}
        why = "; ".join(told.values() if len(told) > 1 else told)
        raise errors.UsageError(
            f"{spec!r} embeds neither the probe texts nor the probe images ({why}); if its items are neither, give its "
            "dimension: --dim N"
        )
    if probes is not None and dim is not None and probes.shape[1] != dim:
        raise errors.Mismatch(f"{spec!r} gives vectors of dimension {probes.shape[1]}, not {dim}; correct --dim or leave it out")
    if metric is Metric.LORENTZ and probes is not None and not hyperbolic.hold(probes[: embedders.REQUIRED]).all():
        raise errors.Mismatch(
            f"{spec!r} gives vectors that are no points (time, space) of a hyperboloid, where time² − ‖space‖² is one constant; "
            "end the model with rmvdb.learning.losses.lorentz.Lift, or register it with another --metric"
        )
    if classifier is not None:
        loaded = embedders.load_classifier(classifier)
        if probes is not None:
            embedders.scored(loaded, probes[: embedders.REQUIRED])
    dim = dim if probes is None else probes.shape[1]
    if compatible_with is not None:
        _check_comparable(registry.version(compatible_with), name, dim, metric)
    return registry.add_version(
        name=name,
        embedder=spec,
        options=dict(options),
        classifier=classifier,
        dim=dim,
        metric=metric,
        fingerprint=embedders.fingerprint(embedder),
        probes=None if probes is None else probes.tobytes(),
        probe_kind=kind,
        base=None,
        head=None,
        compatible_with=compatible_with,
    )


def _check_comparable(old: VersionRow, name: str, dim: int | None, metric: Metric) -> None:
    for what, own, other in (("dimension", dim, old.dim), ("metric", metric, old.metric)):
        if own != other:
            raise errors.Mismatch(
                f"{name!r} has {what} {own}, {old.name!r} has {other}, so their vectors cannot be compared; "
                "leave --compatible-with out"
            )


def probe(embedder: Embedder, *, kind: Kind | None) -> tuple[Kind | None, Vectors | None, Mapping[Kind, errors.ModelError]]:
    """The kind of the fixed probe items that it embeds, its vectors of them, (probes, dim), and why it does not embed others.

    No kind and no vectors if it embeds neither.

    ModelError where it fails on the kind that it was said to take.
    """
    # Texts first: an embedder of texts may take a picture for text, but none of pictures takes a text for a picture.
    failures: dict[Kind, errors.ModelError] = {}
    for each in (kind,) if kind else KINDS:
        try:
            found = embedders.probe_vectors(embedder, dim=_dim(embedder, each), kind=each)
        except errors.ModelError as exc:
            if kind:
                raise
            failures[each] = exc
        else:
            embedders.check_steady(embedder, found, kind=each)
            return each, found, failures
    return None, None, failures


def _dim(embedder: Embedder, kind: Kind) -> int:
    """The dimension that it gives for a probe item; 1 where it takes none, which the caller finds out."""
    try:
        return int(np.asarray(embedder.embed(embedders.probes(kind)[:1])).shape[-1])
    except Exception:  # noqa: BLE001 (foreign code: whatever it raises, it does not take such items)
        return 1


def check_model(row: VersionRow, embedder: Embedder) -> bool:
    """ModelError if its weights, or its vectors of the probe items, are not those that were registered; False if nothing was
    probed then."""
    if row.fingerprint and (weights := embedders.fingerprint(embedder)) != row.fingerprint:
        raise errors.ModelError(
            f"The weights of model version {row.name!r} are not those that were registered (SHA-256 {str(weights)[:12]}…, not "
            f"{row.fingerprint[:12]}…); put them back, or register the new ones as a version of their own"
        )
    if row.probes is None:
        return False
    known = np.frombuffer(row.probes, np.float32).reshape(-1, row.dim)
    try:
        found = embedders.probe_vectors(embedder, dim=row.dim, kind=row.probe_kind)  # type: ignore[arg-type]
    except errors.ModelError as exc:
        raise errors.ModelError(f"{row.embedder} is not as it was when {row.name!r} was registered: {exc}") from exc
    if not embedders.same_model(known, found):
        raise errors.ModelError(
            f"{row.embedder} gives other vectors for the probe items than when {row.name!r} was registered; put the old model "
            "and its preprocessing back, or register this one as a version of its own"
        )
    return True


def add_gallery(
    registry: Registry,
    store: VectorStore,
    loaded_models: LoadedModels,
    *,
    name: str,
    model: str,
    collection: str | None,
    id_type: IdType | None,
    fields: Sequence[Field],
    source: str | None,
    loaded_source: Source | None,
    chosen_index: Index,
    times: Mapping[str, float],
) -> GalleryRow:
    """Create a gallery, with these fields and ids of that type (INT64), or adopt an existing `collection` as it is.

    An adopted one is searched with the parameters of `chosen_index` if it has an index of that type. Raises Mismatch where
    dimension, metric or the vectors themselves are not the model's, CannotAdopt for what rmvdb cannot serve, ConfigError for an
    index that cannot be or search parameters that do not fit it, AlreadyExists for a name that is taken, NotOwner for a
    collection of another registry.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise errors.UsageError(f"{name!r} is no name for a gallery; begin with a letter, then letters, digits, '_' and '-'")
    version = registry.version(model)
    if name in {row.name for row in registry.galleries()}:
        return _same_gallery(registry, name, model, collection, source, id_type, fields)
    if collection is None:
        made = collection_name(name, model, "e1")
        schema = _created(store, version, made, id_type or IdType.INT64, fields, chosen_index)
        search = chosen_index.search
    else:
        if fields or id_type:
            raise errors.UsageError(f"Collection {collection!r} is adopted as it is; leave --field and --id-type out")
        schema, search = _adopted(store, version, collection, chosen_index)
        if loaded_source is not None:
            check_made(store, loaded_models, collection, version, loaded_source)
    owner = Owner(registry, store)
    owner.take(name, schema.collection)
    try:
        return registry.add_gallery(
            name=name,
            model=model,
            schema=schema,
            adopted=collection is not None,
            source=source,
            search=search,
            times=times,
        )
    except errors.AlreadyExists:  # somebody else was faster, or it was this one, whose answer was lost
        row = next((each for each in registry.galleries() if each.name == name), None)
        if row is not None and schema.collection in {each.name for each in registry.collections(row.id)}:
            return row
        if collection is None:
            store.drop(schema.collection)
            owner.release(schema.collection)
        raise


def collection_name(*parts: str) -> str:
    """A name for a collection to be made, of letters, digits and underscores: another one each time, since several projects may
    share a server and call their galleries alike."""
    plain = "_".join("".join(each if each.isascii() and each.isalnum() else "_" for each in part) for part in parts)
    return f"{plain[:LONGEST_NAME]}_{secrets.token_hex(3)}"


def _created(
    store: VectorStore, version: VersionRow, name: str, id_type: IdType, fields: Sequence[Field], chosen: Index
) -> Schema:
    schema = Schema(
        collection=name,
        dim=version.dim,
        metric=Metric(version.metric).stored,
        id_type=id_type,
        fields=tuple(fields),
    )
    names = [schema.id_field, schema.vector_field, *(field.name for field in fields)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise errors.UsageError(
            f"A gallery has one field of a name, and {schema.id_field!r} and {schema.vector_field!r} of its own; "
            f"give --field {twice} another name"
        )
    if TAKEN & set(names[2:]):
        raise errors.UsageError("A record of rmvdb's client has its item by the name 'item'; give --field item another name")
    index_rules.check(chosen, dim=schema.dim, metric=schema.metric, engine=store.version())
    store.create(schema, chosen)
    return schema


def _adopted(store: VectorStore, version: VersionRow, collection: str, chosen: Index) -> tuple[Schema, Mapping[str, Any]]:
    """Its schema, and the parameters that it is searched with."""
    if is_mark(collection):
        raise errors.CannotAdopt(f"Collection {collection!r} is rmvdb's own: it says whose another one is; name that one")
    schema = store.describe(collection)
    check_fits(schema, version)
    if taken := TAKEN & {field.name for field in schema.fields}:
        raise errors.CannotAdopt(
            f"Collection {collection!r} has a field {min(taken)!r}, by which name a record of rmvdb's client has its "
            f"{'item' if 'item' in taken else 'key'}, so that nobody could write it; copy it into a collection with another name "
            "for that field, and adopt that one"
        )
    return schema, index_rules.search_for(store.index(schema.collection), chosen, dim=schema.dim)


def _same_gallery(
    registry: Registry,
    name: str,
    model: str,
    collection: str | None,
    source: str | None,
    id_type: IdType | None,
    fields: Sequence[Field],
) -> GalleryRow:
    row = registry.gallery(name)
    first = registry.collections(row.id)[0]
    if first.model != model or (collection is not None and first.name != collection):
        raise errors.AlreadyExists(
            f"Gallery {name!r} exists with model {first.model!r} and collection {first.name!r}; choose another name"
        )
    schema = schema_from_json(first.schema)
    if id_type not in (None, schema.id_type) or (fields and tuple(fields) != schema.fields):
        there = ", ".join(f"{field.name}:{field.type}" for field in schema.fields) or "none"
        raise errors.AlreadyExists(
            f"Gallery {name!r} exists with {schema.id_type} ids and these fields: {there}; choose another name, or leave "
            "--id-type and --field out"
        )
    if source not in (None, row.source):
        held = f"source {sources.shown(row.source)!r}" if row.source else "no source"
        raise errors.AlreadyExists(f"Gallery {name!r} exists with {held}; to change that: rmvdb gallery source {name} {source!r}")
    return row


def remove_gallery(registry: Registry, store: VectorStore, gallery: GalleryRow, *, drop: bool) -> list[str]:
    """Forget a gallery, and `drop` the collections of it that rmvdb made; those that are left.

    What was adopted is never touched. Raises UpgradeRunning while it is in an upgrade, UsageError while a client serves it,
    NotOwner where another registry has taken what shall be dropped.
    """
    registry.refuse_used(gallery.name)
    left, owner = [], Owner(registry, store)
    if drop:
        owner.expect(gallery.name)
    for row in registry.collections(gallery.id):
        if drop and not row.adopted:
            store.drop(row.name)
            registry.mark_dropped(row.name)
        elif row.dropped_at is None:
            left.append(row.name)
        owner.release(row.name)
    registry.remove_gallery(gallery.name)  # last, so that the same command goes on where it was killed
    return left


def take_gallery(registry: Registry, store: VectorStore, name: str, wait: Callable[[], None]) -> list[str]:
    """Take a gallery from a registry that is lost, or go on with this one although it has gone back; the collections.

    `wait` returns once no lease or write of the other can be alive. A gallery that this registry does not know is found by its
    marks, and can be added then. Raises UnknownName where there is none, UsageError where the other registry is at work.
    """
    owner, known = Owner(registry, store), {row.name for row in registry.galleries()}
    written = [leg.collection for leg in registry.plan(name).write_targets] if name in known else []
    if not (collections := list(dict.fromkeys([*written, *owner.named(name)]))):
        raise errors.UnknownName("gallery", name, known)
    number, epoch = owner.take_over(name, collections, wait)
    if name in known:
        registry.catch_up(name, number=number + BEYOND, epoch=epoch)
        owner.settle(name)
    return collections


def check_fits(schema: Schema, version: VersionRow) -> None:
    """Mismatch where a collection's dimension or metric is not the version's."""
    if schema.dim != version.dim:
        raise errors.Mismatch(
            f"Collection {schema.collection!r} has dimension {schema.dim}, model version {version.name!r} gives {version.dim}; "
            "name the version that made these vectors"
        )
    if schema.metric != Metric(version.metric).stored:
        raise errors.Mismatch(
            f"Collection {schema.collection!r} is compared by {schema.metric}, model version {version.name!r} by "
            f"{version.metric}; "
            f"register the version with --metric {schema.metric}"
        )


def check_unchanged(store: VectorStore, row: CollectionRow) -> Schema:
    """The collection's schema; CollectionChanged where it is not what was registered, CollectionMissing where it is gone."""
    registered, found = schema_from_json(row.schema), store.describe(row.name)
    for name in ("dim", "metric", "id_type", "id_field", "vector_field"):
        if getattr(found, name) != getattr(registered, name):
            raise errors.CollectionChanged(
                f"Collection {row.name!r} has {name} {getattr(found, name)!r}, not {getattr(registered, name)!r} as when it was "
                "registered; restore it, or register it as a gallery of its own"
            )
    return found


def check_vectors(
    registry: Registry, store: VectorStore, loaded_models: LoadedModels, gallery: GalleryRow, source: Source
) -> str:
    """How many records of what the gallery is searched in are what their model makes of their items, in words.

    Mismatch where they are not. In place of a copy that is emptied what it was copied from is looked at; a model that cannot be
    loaded leaves its vectors believed, and so does a source that is not at hand here.
    """
    upgrade = registry.active_upgrade(gallery.id)
    kept = upgrade.original if upgrade else None
    compared = 0
    for collection in [kept] if kept else [leg.collection for leg in registry.plan(gallery.name).legs]:
        version = registry.version(registry.collection(collection).model)
        try:
            compared += check_made(store, loaded_models, collection, version, source) if _loads(loaded_models, version) else 0
        except errors.SourceUnavailable as exc:
            return f"no vector could be compared: {exc}; rmvdb doctor compares them where it is"
    if not compared:
        return UNCOMPARED
    return f"{compared} of its records, embedded again, {'is' if compared == 1 else 'are'} what is stored"


def _loads(loaded_models: LoadedModels, version: VersionRow) -> bool:
    try:
        loaded_models.embedder(version.base or version.name)
    except errors.ModelError:
        return False
    return True


def check_made(store: VectorStore, loaded_models: LoadedModels, collection: str, version: VersionRow, source: Source) -> int:
    """The same dimension from another model is refused: a few records are embedded again. How many of them could be."""
    records = next(store.scan(collection, fields=None, vector=True, page=LOOKED_AT), [])
    items = sources.given(source, records)[0]
    there = [record for record in records if record.id in items]
    if not there:
        if records and isinstance(source, sources.FieldSource):
            _expect_field(store, collection, records, source.field)
        return 0
    embedder = loaded_models.embedder(version.base or version.name)
    raw, bad = embedders.embed_checked(embedder, [items[record.id] for record in there], version.dim, confirm=True)
    own = loaded_models.apply_head(version.name, raw)
    far = [record for at, record in enumerate(there) if at not in bad and _distance(record, own[at]) > AGREES]
    if len(far) * 2 > len(there) - len(bad):
        raise errors.Mismatch(
            f"The vectors in collection {collection!r} were not made by model version {version.name!r} from these items: "
            f"{len(far)} of {counted(len(there), 'record')}, such as {far[0].id!r}, gave something else; name the version, "
            "or the source, that made them"
        )
    return len(there) - len(bad)


def _expect_field(store: VectorStore, collection: str, records: Sequence[Record], field: str) -> None:
    """UsageError if neither the collection nor one of these records has that field."""
    declared = (each.name for each in store.describe(collection).fields)
    known = sorted({*declared, *(name for record in records for name in record.fields)})
    if field not in known:
        raise errors.UsageError(
            f"Collection {collection!r} has no field {field!r}, from which --source takes the items; it has: "
            f"{', '.join(known) or 'none'}"
        )


def _distance(record: Record, own: Vectors) -> float:
    stored = np.asarray(record.vector, np.float64)
    scale = float(np.linalg.norm(stored) * np.linalg.norm(own))
    return 1.0 - float(stored @ own) / scale if scale else 0.0
