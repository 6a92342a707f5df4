"""Another program beside rmvdb, on the same engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from pymilvus import MilvusClient

from rmvdb.engines.milvus import MilvusStore
from rmvdb.engines.milvus.writing import _TICK


class Other(MilvusClient):  # type: ignore[misc]
    """pymilvus, with a pause after each write: Lite 2.5 does not show a row to a read within the same millisecond.

    rmvdb's own writes wait by themselves. A fast disk writes a row in less.
    """

    def insert(self, *args: Any, **options: Any) -> Any:
        return self._rested(super().insert(*args, **options))

    def upsert(self, *args: Any, **options: Any) -> Any:
        return self._rested(super().upsert(*args, **options))

    @staticmethod
    def _rested(answer: Any) -> Any:
        time.sleep(_TICK)
        return answer


@pytest.fixture
def client(milvus_store: MilvusStore) -> Iterator[MilvusClient]:
    """pymilvus itself, as another program would use it on the same engine."""
    milvus_store.version()
    other = Other(uri=milvus_store._connection.place, dedicated=True)
    yield other
    other.close()
