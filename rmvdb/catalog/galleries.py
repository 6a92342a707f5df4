"""Galleries: create, adopt, remove, and take from a registry that is lost."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rmvdb import errors
from rmvdb.catalog.checks import check_fits, check_ids, check_made, check_vectors, say_compared, say_unsettled
from rmvdb.engines import index_rules
from rmvdb.items import sources
from rmvdb.protocols import Source, VectorStore
from rmvdb.registry.codec import schema_from_json
from rmvdb.registry.mark import Owner, is_mark
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow, VersionRow
from rmvdb.serving.loaded_models import LoadedModels
from rmvdb.types import Field, IdType, Index, Metric, Schema

#: Characters of a collection's name before its random end. Milvus takes 255 in all.
LONGEST_NAME = 200
#: The names by which `Client.upsert` takes a record's id and item, which no field can have.
RESERVED = {"id", "item"}


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
    say: Callable[[str], None] = lambda _: None,
) -> GalleryRow:
    """Create a gallery with these fields and ids of that type (INT64), or adopt an existing `collection` unchanged.

    An adopted collection is searched with the parameters of `chosen_index` if it has an index of that type. `say` hears how many
    of its records, embedded again, match the stored vectors.

    Raises: Mismatch if dimension, metric or vectors are not the model's, CannotAdopt if rmvdb cannot serve the collection,
    ConfigError if the index is impossible or the search parameters do not fit it, AlreadyExists if the name is taken, NotOwner
    if the collection belongs to another registry.
    """
    _check_name(name)
    version = registry.version(model)
    if name in {row.name for row in registry.galleries()}:
        row = _same_gallery(registry, name, model, collection, source, id_type, fields)
        if loaded_source is not None and registry.collections(row.id)[-1].adopted:
            say(check_vectors(registry, store, loaded_models, row, loaded_source))
        return row
    if collection is None:
        made = collection_name(name, model, "e1")
        schema = _created(store, version, made, id_type or IdType.INT64, fields, chosen_index)
        search = chosen_index.search
    elif fields or id_type:
        raise errors.UsageError(f"Collection {collection!r} is adopted unchanged; leave --field and --id-type out")
    else:
        schema, search = _adopted(store, version, collection, chosen_index)
        if loaded_source is not None:
            say(say_compared(check_made(store, loaded_models, collection, version, loaded_source)))
        if unsettled := say_unsettled(store, collection, name):
            say(unsettled)
    values: dict[str, Any] = {"name": name, "model": model, "schema": schema, "source": source, "search": search, "times": times}
    return _register(registry, store, adopted=collection is not None, **values)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,99}", name):
        raise errors.UsageError(
            f"{name!r} cannot name a gallery; begin with a letter, then letters, digits, '_' and '-', at most 100 in all"
        )


def _register(registry: Registry, store: VectorStore, *, name: str, schema: Schema, adopted: bool, **values: Any) -> GalleryRow:
    """Take the collection for the gallery, and register both."""
    owner = Owner(registry, store)
    was_marked = owner.read(schema.collection) is not None
    owner.take(name, schema.collection)
    try:
        return registry.add_gallery(name=name, schema=schema, adopted=adopted, **values)
    except errors.AlreadyExists:  # another process was faster, or this call succeeded and its answer was lost
        if (registered := _holder(registry, name, schema.collection)) is not None:
            return registered
        if not adopted:
            store.drop(schema.collection)
        if not was_marked and registry.holder(schema.collection) is None:
            owner.release(schema.collection)
        raise


def settle_gallery(
    registry: Registry, store: VectorStore, name: str, report: Callable[[str, int, int], None] = lambda *_: None
) -> int:
    """Wait until searches find every record of the gallery, and return how many there are. Write no record.

    `report` gets a collection, the number of its rows that are indexed, and the number of all. An error that it raises ends the
    wait. Raises NotOwner if a collection belongs to another registry.
    """
    Owner(registry, store).expect(name)
    collections = [leg.collection for leg in registry.plan(name).legs]
    for collection in collections:
        store.settle(collection, report=functools.partial(report, collection))
    return sum(map(store.count, collections))


def _holder(registry: Registry, name: str, collection: str) -> GalleryRow | None:
    """Return the gallery of that name if it holds the collection."""
    row = next((each for each in registry.galleries() if each.name == name), None)
    return row if row is not None and collection in {each.name for each in registry.collections(row.id)} else None


def collection_name(*parts: str) -> str:
    """Return a new name for a collection, of letters, digits and underscores.

    It is another one each time, since several projects may share a server and give their galleries the same name.
    """
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
            f"A gallery has {schema.id_field!r} and {schema.vector_field!r} of its own, and each name once; "
            f"give --field {twice} another name"
        )
    if RESERVED & set(names[2:]):
        raise errors.UsageError("rmvdb's client takes a record's item by the name 'item'; give --field item another name")
    index_rules.check(chosen, dim=schema.dim, metric=schema.metric, engine=store.version())
    store.create(schema, chosen)
    return schema


def _adopted(store: VectorStore, version: VersionRow, collection: str, chosen: Index) -> tuple[Schema, Mapping[str, Any]]:
    """Return the collection's schema, and the parameters to search it with."""
    if is_mark(collection):
        raise errors.CannotAdopt(
            f"Collection {collection!r} is a mark of rmvdb's own, which says who owns another collection; name that other one"
        )
    schema = store.describe(collection)
    check_fits(schema, version)
    if taken := RESERVED & {field.name for field in schema.fields}:
        raise errors.CannotAdopt(
            f"Collection {collection!r} has a field {min(taken)!r}, by which name a record of rmvdb's client has its "
            f"{'item' if 'item' in taken else 'key'}, so the client could not write that field; copy it into a collection with "
            "another name for that field, and adopt that one"
        )
    check_ids(store, collection)
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
    """Return the gallery of that name. Raise AlreadyExists if any of these differs."""
    row = registry.gallery(name)
    first = registry.collections(row.id)[0]
    if first.model != model or (collection is not None and first.name != collection):
        raise errors.AlreadyExists(
            f"Gallery {name!r} exists with model {first.model!r} and collection {first.name!r}; choose another name"
        )
    schema = schema_from_json(first.schema)
    if id_type not in (None, schema.id_type) or (fields and tuple(fields) != schema.fields):
        current = ", ".join(f"{field.name}:{field.type}" for field in schema.fields) or "none"
        raise errors.AlreadyExists(
            f"Gallery {name!r} exists with {schema.id_type} ids and these fields: {current}; choose another name, or leave "
            "--id-type and --field out"
        )
    if source not in (None, row.source):
        present = f"source {sources.shown(row.source)!r}" if row.source else "no source"
        raise errors.AlreadyExists(
            f"Gallery {name!r} exists with {present}; to change that: rmvdb gallery source {name} {source!r}"
        )
    return row


def remove_gallery(registry: Registry, store: VectorStore, gallery: GalleryRow, *, drop: bool) -> list[str]:
    """Forget a gallery, and `drop` the collections that rmvdb made for it. Return the collections that are left.

    An adopted collection is never dropped.

    Raises: UpgradeRunning during an upgrade, UsageError while a client serves the gallery, NotOwner if another registry has
    taken a collection to drop.
    """
    registry.refuse_used(gallery.name)
    left, owner = [], Owner(registry, store)
    if drop:
        owner.expect(gallery.name)
    for row in registry.collections(gallery.id):
        if row.dropped_at is not None:
            continue  # another program may have made one of this name since
        if drop and not row.adopted:
            store.drop(row.name)
            owner.release(row.name)
            registry.mark_dropped(row.name)
        else:
            left.append(row.name)
            owner.release(row.name)
    registry.remove_gallery(gallery.name)  # last, so that after a kill the same command finishes
    return left
