"""Another program beside rmvdb, on the same engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pymilvus import MilvusClient

from rmvdb.engines.milvus import MilvusStore


@pytest.fixture
def client(milvus_store: MilvusStore) -> Iterator[MilvusClient]:
    """pymilvus itself, as another program would use it on the same engine."""
    milvus_store.version()
    other = MilvusClient(uri=milvus_store._connection.place, dedicated=True)
    yield other
    other.close()
