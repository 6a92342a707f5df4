"""Ids, schemas and legs as a row holds them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from rmvdb.types import Blend, Id, IdType, Leg, Metric, Schema
from rmvdb.types import Field as SchemaField


def key(id: Id) -> str:
    """Return a record's id as a row of its own holds it.

    Raises:
        TypeError: `rmvdb.canonical` has not checked the id.
    """
    if type(id) is not int and type(id) is not str:
        raise TypeError(f"{id!r} is a {type(id).__name__}, not an id")
    return str(id)


def pack_ids(ids: Iterable[Id]) -> bytes:
    """Pack ids of one type as bytes, in order. An INT64 id takes about four bytes."""
    return zlib.compress(json.dumps(list(ids), ensure_ascii=False).encode())


def unpack_ids(packed: bytes | None) -> list[Id]:
    """Undo `pack_ids`. None gives an empty list."""
    return list(json.loads(zlib.decompress(packed))) if packed else []


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """Return a schema as JSON values."""
    plain = {name: getattr(schema, name) for name in Schema.__slots__}
    return plain | {"fields": [{"name": each.name, "type": each.type, "params": dict(each.params)} for each in schema.fields]}


def schema_from_json(value: Mapping[str, Any]) -> Schema:
    """Undo `schema_to_json`."""
    fields = tuple(SchemaField(**each) for each in value["fields"])
    return Schema(**{**value, "fields": fields, "metric": Metric(value["metric"]), "id_type": IdType(value["id_type"])})


def leg_to_json(leg: Leg) -> dict[str, Any]:
    """Return a leg as JSON values. A leg without a blend has the form that an earlier rmvdb reads."""
    plain = {name: getattr(leg, name) for name in Leg.__slots__ if name != "blend"} | {"transforms": list(leg.transforms)}
    if leg.blend is None:
        return plain
    blend = {name: getattr(leg.blend, name) for name in Blend.__slots__}
    return plain | {"blend": blend | {"transforms": list(leg.blend.transforms)}}


def leg_from_json(value: Mapping[str, Any]) -> Leg:
    """Undo `leg_to_json`."""
    blend = value.get("blend")
    made = Blend(**{**blend, "transforms": tuple(blend["transforms"])}) if blend else None
    return Leg(**{**value, "metric": Metric(value["metric"]), "transforms": tuple(value["transforms"]), "blend": made})
