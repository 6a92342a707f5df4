"""Tests of Milvus that run on some of its engines only."""

from __future__ import annotations

import pytest

server_only = pytest.mark.parametrize("milvus_store", [pytest.param("server_store", marks=pytest.mark.server)], indirect=True)
lite_only = pytest.mark.parametrize("milvus_store", ["lite_store"], indirect=True)
#: In Lite 3 an insert replaces the record of its key, any index is taken, and there are no binary vectors.
not_lite3 = pytest.mark.parametrize(
    "milvus_store", ["lite_store", pytest.param("server_store", marks=pytest.mark.server)], indirect=True
)
