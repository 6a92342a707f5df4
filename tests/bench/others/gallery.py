"""The gallery of the other programs: collections of Milvus Lite, filled with the vectors that rmvdb gets, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient

from tests.bench.curves.cases import Case

OLD, NEW = "old", "new"
#: Records of one write and of one read.
BATCH = 50


class Client(MilvusClient):  # type: ignore[misc]
    """A client of Milvus Lite that answers the one call of embedflow's that Milvus Lite does not: it has no partitions."""

    def list_partitions(self, collection_name: str, **_: Any) -> list[str]:
        """Return the partition that every collection has."""
        return ["_default"]


class Gallery:
    """Collections with the fields id, vector and text; a record's id is its row in the case."""

    def __init__(self, case: Case, at: Path) -> None:
        at.mkdir(parents=True, exist_ok=True)
        self.case = case
        self.old_model, self.new_model = (_embedder(version.embedder) for version in case.versions)
        self.uri = str(at / "milvus.db")
        self.client = Client(self.uri)
        texts = [str(record["text"]) for record in case.records]
        models = {OLD: self.old_model, NEW: self.new_model}
        self.dims = {name: int(model.embed(texts[:1]).shape[1]) for name, model in models.items()}
        for name, dim in self.dims.items():
            self._create(name, dim)
        for rows in batches(range(len(texts))):
            some = [texts[row] for row in rows]
            self.put(OLD, rows, self.old_model.embed(some), some)

    def _create(self, name: str, dim: int) -> None:
        schema = self.client.create_schema(auto_id=False)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        schema.add_field("text", DataType.VARCHAR, max_length=65_535)
        index = self.client.prepare_index_params()
        index.add_index("vector", index_type="FLAT", metric_type="COSINE")
        self.client.create_collection(name, schema=schema, index_params=index)

    def put(self, name: str, rows: Sequence[int], vectors: np.ndarray, texts: Sequence[str]) -> None:
        """Write records of a collection."""
        fields = zip(rows, vectors.tolist(), texts, strict=True)
        self.client.upsert(name, [{"id": int(row), "vector": vector, "text": text} for row, vector, text in fields])

    def get(self, name: str, rows: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        """Return the vectors and texts of these records, in this order."""
        found = {each["id"]: each for each in self.client.get(name, [int(row) for row in rows])}
        return np.array([found[row]["vector"] for row in rows], np.float32), [found[row]["text"] for row in rows]

    def search(self, name: str, vector: np.ndarray, limit: int = 10) -> list[tuple[int, float]]:
        """Return ids and similarities, the most similar first."""
        hits = self.client.search(name, [vector.tolist()], limit=limit)[0]
        return [(int(hit["id"]), float(hit["distance"])) for hit in hits]

    def copy(self, rows: Sequence[int]) -> None:
        """Embed the texts of these records anew, and write them into the new collection."""
        _, texts = self.get(OLD, rows)
        self.put(NEW, rows, self.new_model.embed(texts), texts)

    def write(self, row: int, text: str) -> None:
        """Change a record where an application that knows nothing of the backfill writes: in the old collection."""
        self.put(OLD, [row], self.old_model.embed([text]), [text])

    def close(self) -> None:
        """Let go of the file."""
        self.client.close()


def queries(model: Any, items: Sequence[str]) -> np.ndarray:
    """Return the vectors of queries, by the model's own way for them if it has one."""
    embedded: np.ndarray = getattr(model, "embed_queries", model.embed)(list(items))
    return embedded


def batches(rows: Sequence[int]) -> list[list[int]]:
    """Divide rows into batches."""
    return [[int(row) for row in rows[start : start + BATCH]] for start in range(0, len(rows), BATCH)]


def order(case: Case) -> np.ndarray:
    """Return the rows in the random order in which the other programs move them."""
    return np.random.default_rng(0).permutation(len(case.records))


def _embedder(entry: str) -> Any:
    module, name = entry.split(":")
    return getattr(__import__(module, fromlist=[name]), name)()
