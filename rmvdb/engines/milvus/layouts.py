"""The layout of a collection: what it has besides its schema and the index on its vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rmvdb.engines.milvus.describing import parameters, read, schema_of
from rmvdb.engines.milvus.driver import ONCE, foreign_errors, pymilvus
from rmvdb.engines.milvus.session import Session
from rmvdb.errors import EngineError, EngineUnavailable

if TYPE_CHECKING:
    from rmvdb.engines.milvus.driver import MilvusClient

#: The beginnings of the properties that users set. An engine adds some of its own.
_PROPERTIES = ("collection.", "lazyload.", "mmap.", "partitionkey.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A layout, as pymilvus takes it."""

    #: Of `create_collection`. The consistency level is for other programs: every call of rmvdb names its own.
    of_collection: Mapping[str, Any] = field(default_factory=lambda: {"consistency_level": "Bounded"})
    #: Of `load_collection`.
    of_load: Mapping[str, Any] = field(default_factory=dict)
    #: The indexes on fields other than the vector, as the engine describes them.
    indexes: Sequence[Mapping[str, Any]] = ()


def layout(session: Session, collection: str) -> Layout:
    """Read the layout of a collection. Milvus Lite has none but the consistency level."""
    raw, vector = read(session, collection), schema_of(session, collection).vector_field
    made: dict[str, Any] = {"consistency_level": str(raw.get("consistency_level_name") or "Bounded")}
    if session.engine().name == "milvus-lite":
        return Layout(of_collection=made)
    made["num_shards"] = int(raw.get("num_shards") or 1)
    if any(each.get("is_partition_key") for each in raw["fields"]):
        made["num_partitions"] = int(raw["num_partitions"])
    kept = {name: value for name, value in raw.get("properties", {}).items() if name.startswith(_PROPERTIES)}
    if kept:
        made["properties"] = kept
    indexes = session.run(collection, lambda client: _indexes(client, collection))
    replicas = _replicas(session, collection)
    return Layout(
        of_collection=made,
        of_load={"replica_number": replicas} if replicas > 1 else {},
        indexes=[each for each in indexes if each["field_name"] != vector],
    )


def index_fields(client: MilvusClient, collection: str, layout: Layout) -> None:
    """Make the indexes on fields that the collection does not have yet."""
    there = set(client.list_indexes(collection, **ONCE)) if layout.indexes else set()
    for each in layout.indexes:
        if (name := each["index_name"]) in there:
            continue
        params = pymilvus().MilvusClient.prepare_index_params()
        params.add_index(each["field_name"], index_type=each.get("index_type", ""), index_name=name, params=parameters(each))
        try:
            client.create_index(collection, params, sync=False, **ONCE)
        except foreign_errors():  # another process may have been faster
            if name not in client.list_indexes(collection, **ONCE):
                raise


def _indexes(client: MilvusClient, collection: str) -> list[Mapping[str, Any]]:
    found = (client.describe_index(collection, name, **ONCE) for name in client.list_indexes(collection, **ONCE))
    return [dict(each) for each in found if each]


def _replicas(session: Session, collection: str) -> int:
    """Return how often the collection is loaded, 1 if this user may not ask."""
    try:
        return len(session.run(collection, lambda client: client.describe_replica(collection, **ONCE)))
    except EngineUnavailable:
        raise
    except EngineError:
        return 1
