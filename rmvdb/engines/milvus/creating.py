"""Creating and dropping collections, with schemas and indexes in pymilvus' own form."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rmvdb.engines.milvus import layouts
from rmvdb.engines.milvus.connection import Engine
from rmvdb.engines.milvus.describing import dim_of, exists, read, vector_index
from rmvdb.engines.milvus.driver import ONCE, foreign_errors, pymilvus
from rmvdb.engines.milvus.session import Session
from rmvdb.errors import AlreadyExists, EngineError, EngineUnavailable, RmvdbError
from rmvdb.types import IdType, Index, Schema

if TYPE_CHECKING:
    from rmvdb.engines.milvus.driver import MilvusClient

#: Seconds within which a collection, mostly an empty one, must be loaded.
_LOADED_AFTER = 600.0


def create(session: Session, schema: Schema, index: Index, *, like: str | None = None) -> None:
    """Create the collection with its index and load it; finish one that was left half made.

    Raises:
        AlreadyExists: The collection exists with another schema.
    """
    name = schema.collection
    wanted = layouts.layout(session, like) if like and exists(session, like) else layouts.Layout()
    made = not exists(session, name) and _make(session, schema, wanted)
    if not made:
        _same(schema, read(session, name))
    try:
        _finish(session, schema, index, wanted)
    except EngineUnavailable:
        raise  # another process may have finished and filled it meanwhile; the next call finishes the rest
    except RmvdbError:
        if made:
            drop(session, name)
        raise


def drop(session: Session, collection: str) -> None:
    """Remove the collection and its records; do nothing if it does not exist."""
    session.schemas.pop(collection, None)
    if exists(session, collection):
        session.run(collection, lambda client: client.drop_collection(collection, **ONCE))


def move_aliases(session: Session, collection: str, target: str) -> list[str]:
    """Point every alias of the collection to the target, and return them; an engine without aliases gives none."""
    aliases = sorted(read(session, collection).get("aliases", ())) if exists(session, collection) else []

    def move(client: MilvusClient) -> None:
        for alias in aliases:
            client.alter_alias(target, alias, **ONCE)

    session.run(target, move)
    return aliases


def _make(session: Session, schema: Schema, layout: layouts.Layout) -> bool:
    """Create the collection; return False if another process was faster."""
    made = _engine_schema(schema, session.engine())
    try:
        session.run(
            schema.collection,
            lambda client: client.create_collection(schema.collection, schema=made, **layout.of_collection, **ONCE),
        )
    except EngineError:
        if not exists(session, schema.collection):
            raise
        return False
    return True


def _finish(session: Session, schema: Schema, index: Index, layout: layouts.Layout) -> None:
    name, field = schema.collection, schema.vector_field
    params = index_params(schema, index, session.engine())

    def finish(client: MilvusClient) -> None:
        found = vector_index(client, name, field)
        if not found:
            try:
                client.create_index(name, params, sync=False, **ONCE)
            except foreign_errors():
                if not (found := vector_index(client, name, field)):  # no other process was faster
                    raise
        if found and found.get("metric_type") != schema.metric.value:
            raise AlreadyExists(f"Collection {name!r} exists with metric {found.get('metric_type')}; drop it or take its name")
        layouts.index_fields(client, name, layout)
        client.load_collection(name, _async=True, **layout.of_load, **ONCE)

    def load(client: MilvusClient) -> str:
        state = str(client.get_load_state(name, **ONCE)["state"].name)
        if state not in ("Loading", "Loaded"):
            client.load_collection(name, _async=True, **layout.of_load, **ONCE)
        return state

    session.run(name, finish)
    # pymilvus would wait without end or, given a time, repeat every failure for as long. So the wait is here.
    deadline = time.monotonic() + _LOADED_AFTER
    while session.run(name, load) != "Loaded":
        if time.monotonic() > deadline:
            way_out = "look at the memory of its query nodes and their log, then run the same command again"
            raise EngineUnavailable(f"Milvus at {session.place()} has not loaded {name!r} for {_LOADED_AFTER:g} s; {way_out}")
        time.sleep(0.05)


def _engine_schema(schema: Schema, engine: Engine) -> Any:
    types = pymilvus().DataType
    made = pymilvus().MilvusClient.create_schema(auto_id=False, enable_dynamic_field=schema.dynamic)
    length = {"max_length": schema.id_max_length} if schema.id_type is IdType.VARCHAR else {}
    made.add_field(schema.id_field, types[schema.id_type.value], is_primary=True, **length)
    made.add_field(schema.vector_field, types.FLOAT_VECTOR, dim=schema.dim)
    for field in schema.fields:
        params = dict(field.params)
        if not engine.partition_keys:
            params.pop("is_partition_key", None)
        if "element_type" in params:
            params["element_type"] = types[params["element_type"]]
        made.add_field(field.name, types[field.type], **params)
    return made


def index_params(schema: Schema, index: Index, engine: Engine) -> Any:
    """Return the index in pymilvus' own form, with exactly the parameters of `index`.

    AUTOINDEX on Lite 3 becomes FLAT: its own choice, HNSW, misses most records that match a filter, and FLAT is as fast.
    """
    params = pymilvus().MilvusClient.prepare_index_params()
    params.add_index(
        field_name=schema.vector_field,
        index_name=schema.vector_field,
        index_type="FLAT" if engine.lite3 and index.type == "AUTOINDEX" else index.type,
        metric_type=schema.metric.value,
        # pymilvus would send True; Milvus 2.4 accepts "true" and "false" only.
        params={name: str(value).lower() if isinstance(value, bool) else value for name, value in index.params.items()},
    )
    return params


def _same(schema: Schema, raw: Mapping[str, Any]) -> None:
    """Raise AlreadyExists if the collection does not fit the schema; lengths and such differ between engines."""
    found = {field["name"]: (field["type"].name, dim_of(field)) for field in raw["fields"]}
    wanted: dict[str, tuple[str, int]] = {field.name: (field.type, 0) for field in schema.fields}
    wanted |= {schema.id_field: (schema.id_type.value, 0), schema.vector_field: ("FLOAT_VECTOR", schema.dim)}
    if found != wanted or bool(raw.get("enable_dynamic_field")) != schema.dynamic:
        raise AlreadyExists(f"Collection {schema.collection!r} exists with another schema; drop it or take another name")
