"""How ids, schemas and legs are written in a row."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from rmvdb.types import Field as SchemaField
from rmvdb.types import Id, IdType, Leg, Metric, Schema


def key(id: Id) -> str:
    """How a record's id is written in a row of its own; TypeError for one that `canonical` has not seen."""
    if type(id) is not int and type(id) is not str:
        raise TypeError(f"{id!r} is no id, but a {type(id).__name__}")
    return str(id)


def pack_ids(ids: Iterable[Id]) -> bytes:
    """Ids of one kind as bytes, in order; about four bytes an INT64 id."""
    return zlib.compress(json.dumps(list(ids), ensure_ascii=False).encode())


def unpack_ids(packed: bytes | None) -> list[Id]:
    """The inverse of `pack_ids`; nothing for None."""
    return list(json.loads(zlib.decompress(packed))) if packed else []


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """A schema as JSON values."""
    plain = {name: getattr(schema, name) for name in Schema.__slots__}
    return plain | {"fields": [{"name": each.name, "type": each.type, "params": dict(each.params)} for each in schema.fields]}


def schema_from_json(value: Mapping[str, Any]) -> Schema:
    """The inverse of `schema_to_json`."""
    fields = tuple(SchemaField(**each) for each in value["fields"])
    return Schema(**{**value, "fields": fields, "metric": Metric(value["metric"]), "id_type": IdType(value["id_type"])})


def leg_to_json(leg: Leg) -> dict[str, Any]:
    """A leg as JSON values."""
    return {name: getattr(leg, name) for name in Leg.__slots__} | {"transforms": list(leg.transforms)}


def leg_from_json(value: Mapping[str, Any]) -> Leg:
    """The inverse of `leg_to_json`."""
    return Leg(**{**value, "metric": Metric(value["metric"]), "transforms": tuple(value["transforms"])})
