"""A collection's schema and index, and whether rmvdb can serve it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rmvdb.engines import index_rules
from rmvdb.engines.milvus.connection import Engine
from rmvdb.engines.milvus.driver import ONCE
from rmvdb.engines.milvus.session import Session
from rmvdb.errors import CannotAdopt, EngineError
from rmvdb.types import Field, IdType, Index, Metric, Schema

if TYPE_CHECKING:
    from rmvdb.engines.milvus.driver import MilvusClient

#: The parts of an index's description that are not parameters.
_NO_PARAMETERS = {"index_type", "metric_type", "dim", "field_name", "index_name", "state", "params"}
_NO_PARAMETERS |= {"total_rows", "indexed_rows", "pending_index_rows"}


def describe(session: Session, collection: str) -> Schema:
    """Read the schema; an alias stands for its collection. From here on this session reads and writes by it.

    Until now the name may have been another collection's.

    Raises:
        CannotAdopt: rmvdb cannot serve the collection.
    """
    raw = read(session, collection)
    _adoptable(collection, raw, session.engine())
    if partitions := _partitions(session, collection, raw):
        _refuse(collection, f"has the partition {partitions[0]!r}", "copy it into a collection without partitions")
    return _noted(session, collection, raw)


def _noted(session: Session, collection: str, raw: Mapping[str, Any]) -> Schema:
    name, vector = raw["collection_name"], _vector_fields(raw)[0]
    index = session.run(collection, lambda client: vector_index(client, collection, vector["name"]))
    metric = index.get("metric_type", "")
    if metric not in set(Metric):
        _refuse(collection, f"has no index with a metric on {vector['name']!r}", "create one, such as AUTOINDEX with COSINE")
    session.most[collection] = session.most[name] = index_rules.reach(Index(type=index["index_type"])).most
    found = session.schemas[collection] = session.schemas[name] = _schema(name, raw, Metric(metric))
    return found


def index(session: Session, collection: str) -> Index:
    """Return the index on the vectors as it was built, as far as the engine tells; Lite 3 gives no parameters.

    Raises:
        EngineError: The collection has none any more.
    """
    field = schema_of(session, collection).vector_field
    found = session.run(collection, lambda client: vector_index(client, collection, field))
    if not found:
        raise EngineError(f"Collection {collection!r} has no index on {field!r} any more; create one, and load it")
    session.most[collection] = index_rules.reach(Index(type=found["index_type"])).most
    return Index(type=found["index_type"], params=parameters(found))


def parameters(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters in an index's description. pymilvus' ORM, Java, Go and Node send them as one value, `params`."""
    nested = found.get("params")
    every = {**(nested if isinstance(nested, dict) else {}), **found}
    return {name: every[name] for name in every.keys() - _NO_PARAMETERS}


def exists(session: Session, collection: str) -> bool:
    """Return whether a collection of that name exists."""
    return bool(session.run(collection, lambda client: client.has_collection(collection, **ONCE)))


def field_names(session: Session, collection: str) -> list[str]:
    """Return the names of its fields now; the collection may be half made."""
    return [str(field["name"]) for field in read(session, collection)["fields"]]


def collection_names(session: Session) -> list[str]:
    """Return the names of all collections."""
    return list(session.run("", lambda client: client.list_collections(**ONCE)))


def schema_of(session: Session, collection: str) -> Schema:
    """Return the schema as it was last read. rmvdb goes on serving an adopted collection that another program has changed
    since."""
    return session.schemas.get(collection) or _noted(session, collection, read(session, collection))


def read(session: Session, collection: str) -> dict[str, Any]:
    """Return the engine's description of a collection."""
    return dict(session.run(collection, lambda client: client.describe_collection(collection, **ONCE)))


def _partitions(session: Session, collection: str, raw: Mapping[str, Any]) -> list[str]:
    """Return the partitions that a user made; those of a partition key are the engine's own."""
    if session.engine().lite2 or any(field.get("is_partition_key") for field in raw["fields"]):
        return []
    names = session.run(collection, lambda client: client.list_partitions(collection, **ONCE))
    return [name for name in names if name != "_default"]


def vector_index(client: MilvusClient, collection: str, field: str) -> dict[str, Any]:
    """Return the description of the index on the vector field, empty if it has none."""
    for name in client.list_indexes(collection, **ONCE):
        found = client.describe_index(collection, name, **ONCE) or {}
        if found.get("field_name") == field:
            return dict(found)
    return {}


def _vector_fields(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [field for field in raw["fields"] if "VECTOR" in field["type"].name]


def dim_of(field: Mapping[str, Any]) -> int:
    """Return the dimension of a field, 0 if it does not hold vectors."""
    return int(field.get("params", {}).get("dim", 0))


def _adoptable(collection: str, raw: Mapping[str, Any], engine: Engine) -> None:
    vectors = _vector_fields(raw)
    kinds = ", ".join(field["type"].name for field in vectors)
    copy = "copy it into a collection with ids of your own"
    if raw.get("auto_id") or any(field.get("auto_id") for field in raw["fields"]):
        _refuse(collection, "makes its ids itself (auto_id)", copy)
    if raw.get("functions"):
        _refuse(collection, f"computes fields by the function {raw['functions'][0].get('name')!r}", "copy it without functions")
    if len(vectors) != 1:
        _refuse(collection, f"has {len(vectors)} vector fields ({kinds})", "copy it into a collection with one vector field")
    if vectors[0]["type"].name != "FLOAT_VECTOR":
        _refuse(collection, f"has vectors of type {kinds}", "copy it into a collection of FLOAT_VECTOR")
    if vectors[0].get("nullable"):
        _refuse(collection, "may hold records without a vector", "copy it into a collection whose vector is not nullable")
    if nested := next((field for field in raw["fields"] if _is_struct(field)), None):
        _refuse(collection, f"has the field {nested['name']!r} of structs", "copy it with fields of their own")
    if not engine.partition_keys and any(field.get("is_partition_key") for field in raw["fields"]):
        _refuse(collection, f"has a partition key, in which {' '.join(engine)} loses records", "use Milvus 2.4 or newer")
    if str(raw.get("properties", {}).get("partitionkey.isolation", "")).lower() == "true":
        _refuse(collection, "takes no search without its partition key (partitionkey.isolation)", "copy it without that property")
    if _seconds(raw.get("properties", {}).get("collection.ttl.seconds")) > 0:
        _refuse(collection, "forgets records by itself (collection.ttl.seconds)", "drop that property")


def _is_struct(field: Mapping[str, Any]) -> bool:
    """Return whether a field holds structs. Milvus 2.6 describes it as an array, of which the element has that type."""
    return any("STRUCT" in str(getattr(field.get(part), "name", "")) for part in ("type", "element_type"))


def _refuse(collection: str, what: str, way_out: str) -> None:
    raise CannotAdopt(f"Collection {collection!r} {what}, which rmvdb cannot serve; {way_out}")


def _seconds(value: Any) -> float:
    return float(value) if value else 0.0


def _schema(name: str, raw: Mapping[str, Any], metric: Metric) -> Schema:
    vector = _vector_fields(raw)[0]
    primary = next(field for field in raw["fields"] if field.get("is_primary"))
    return Schema(
        collection=name,
        dim=dim_of(vector),
        metric=metric,
        id_type=IdType(primary["type"].name),
        id_field=primary["name"],
        id_max_length=int(primary.get("params", {}).get("max_length", 512)),
        vector_field=vector["name"],
        fields=tuple(_field(field) for field in raw["fields"] if field is not primary and field is not vector),
        dynamic=bool(raw.get("enable_dynamic_field")),
    )


def _field(raw: Mapping[str, Any]) -> Field:
    params = dict(raw.get("params", {}))
    if raw["type"].name == "ARRAY":
        params["element_type"] = raw["element_type"].name
    params |= {key: True for key in ("nullable", "is_partition_key", "is_clustering_key") if raw.get(key)}
    if (default := _default(raw.get("default_value"))) is not None:
        params["default_value"] = default
    return Field(name=raw["name"], type=raw["type"].name, params=params)


def _default(value: Any) -> Any:
    """Return the value inside Milvus' message, which names its type."""
    kind = value.WhichOneof("data") if hasattr(value, "WhichOneof") else None
    return getattr(value, kind) if kind else None if hasattr(value, "WhichOneof") else value
