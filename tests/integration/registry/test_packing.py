"""Packed ids come back."""

from __future__ import annotations

import pytest

from rmvdb.registry.codec import pack_ids, schema_from_json, schema_to_json, unpack_ids
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import GalleryRow
from tests.support.photos import shape


@pytest.mark.parametrize("ids", [[], [3, 1, 2], [-(2**63), 2**63 - 1], ["a", "ü,\"'", "0"]])
def test_packed_ids_come_back_in_order_and_of_their_kind(ids: list[int] | list[str]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


def test_nothing_packed_is_no_ids() -> None:
    assert unpack_ids(None) == []


def test_a_schema_comes_back_as_it_was(registry: Registry, gallery: GalleryRow) -> None:
    row = registry.collection("photos_1")

    assert schema_from_json(row.schema) == shape()
    assert schema_from_json(schema_to_json(shape())) == shape()
    assert row.search == {"ef": 64}
    assert row.adopted
