"""Ids, schemas, legs and items of queries as a row holds them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rmvdb.types import Blend, Id, IdType, Item, Leg, Metric, Schema
from rmvdb.types import Field as SchemaField

#: The most bytes of an item that a row holds.
LARGEST_ITEM = 256 * 1024


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
    """Return a leg as JSON values. A leg without a blend and without rescoring has the form that an earlier rmvdb reads."""
    left_out = {"blend"} if leg.rescore else {"blend", "rescore"}
    plain = {name: getattr(leg, name) for name in Leg.__slots__ if name not in left_out} | {"transforms": list(leg.transforms)}
    if leg.blend is None:
        return plain
    blend = {name: getattr(leg.blend, name) for name in Blend.__slots__}
    return plain | {"blend": blend | {"transforms": list(leg.blend.transforms)}}


def leg_from_json(value: Mapping[str, Any]) -> Leg:
    """Undo `leg_to_json`."""
    blend = value.get("blend")
    made = Blend(**{**blend, "transforms": tuple(blend["transforms"])}) if blend else None
    return Leg(**{**value, "metric": Metric(value["metric"]), "transforms": tuple(value["transforms"]), "blend": made})


def item_to_row(item: Item) -> tuple[str, bytes] | None:
    """Return an item's kind and bytes: of a text, bytes, a path or other JSON values.

    Return None for everything else, such as a picture or an array, and for an item over `LARGEST_ITEM` bytes.
    """
    if isinstance(item, str | bytes | bytearray) and len(item) > LARGEST_ITEM:
        return None
    match item:
        case str():
            kind, payload = "text", item.encode(errors="surrogatepass")
        case bytes() | bytearray():
            kind, payload = "bytes", bytes(item)
        case os.PathLike():
            # Another process reads it, in another folder.
            kind, payload = "path", str(Path(item).absolute()).encode(errors="surrogatepass")
        case _:
            kind, payload = "json", _as_json(item)
    return (kind, payload) if 0 < len(payload) <= LARGEST_ITEM else None


def _as_json(item: Item) -> bytes:
    """Return the item as JSON, empty if JSON does not give it back."""
    try:
        text = json.dumps(item)
        return text.encode() if type(item) in (dict, int, float) and json.loads(text) == item else b""
    except (TypeError, ValueError, RecursionError):
        return b""


def item_from_row(kind: str, payload: bytes) -> Item:
    """Undo `item_to_row`."""
    match kind:
        case "bytes":
            return payload
        case "json":
            return json.loads(payload)
    text = payload.decode(errors="surrogatepass")
    return Path(text) if kind == "path" else text
