"""Rows of an answer as records."""

from __future__ import annotations

import numpy as np

from rmvdb.engines.milvus.rows import record_of
from rmvdb.types import IdType, Metric, Schema


def test_a_record_does_not_keep_the_other_vectors_of_its_answer_in_memory() -> None:
    answer = np.ones((1_000, 4), np.float32)  # pymilvus gives each row a part of it
    schema = Schema(collection="photos", dim=4, metric=Metric.L2, id_type=IdType.INT64)
    record = record_of(schema, (), {"id": 1, "vector": answer[0]})

    assert record.vector is not None
    assert record.vector.base is None
    assert record.vector.tolist() == [1.0] * 4
