"""Records with fields of every type, and collections for them, on any engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rmvdb.protocols import VectorStore
from rmvdb.types import Field, Id, IdType, Index, Metric, Record, Schema, Vectors

DIM = 8
FLAT = Index(type="FLAT")
FIELDS = (
    Field(name="n", type="INT64"),
    Field(name="city", type="VARCHAR", params={"max_length": 64}),
    Field(name="share", type="FLOAT"),
    Field(name="good", type="BOOL"),
    Field(name="tags", type="ARRAY", params={"element_type": "VARCHAR", "max_capacity": 8, "max_length": 32}),
    Field(name="note", type="JSON"),
)
#: The metrics that a collection may have.
METRICS = [metric for metric in Metric if metric.stored is metric]
CITIES = ("Bern", "Zürich", 'Sankt "Gallen"', "Biel\\Bienne", "")


def schema_of(collection: str, *, metric: Metric = Metric.COSINE, id_type: IdType = IdType.INT64, **changes: Any) -> Schema:
    made = Schema(
        collection=collection, dim=DIM, metric=metric, id_type=id_type, id_field="pk", vector_field="emb", fields=FIELDS
    )
    return replace(made, **changes)


def plain(collection: str, **changes: Any) -> Schema:
    """Return a schema with nothing but ids, vectors and undeclared fields."""
    return schema_of(collection, fields=(), **changes)


def vectors_of(count: int, *, seed: int = 0) -> Vectors:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def fields_of(number: int) -> dict[str, Any]:
    fields = {
        "n": number,
        "city": CITIES[number % len(CITIES)],
        "share": number / 8,
        "good": number % 3 == 0,
        "tags": [f"t{number % 4}", "ü"],
        "note": {"deep": [number, None, "é"]},
    }
    return fields if number % 2 else {**fields, "color": f"c{number % 5}", "size": number % 7}


def records_of(ids: Sequence[Id], *, seed: int = 0) -> list[Record]:
    vectors = vectors_of(len(ids), seed=seed)
    return [Record(id=id, vector=vectors[at], fields=fields_of(at)) for at, id in enumerate(ids)]


def bare(ids: Sequence[Id]) -> list[Record]:
    vectors = vectors_of(len(ids))
    return [Record(id=id, vector=vectors[at]) for at, id in enumerate(ids)]


def stacked(records: Sequence[Record]) -> Vectors:
    return np.stack([record.vector for record in records if record.vector is not None])


def scanned(store: VectorStore, collection: str, **options: Any) -> list[Id]:
    return [record.id for page in store.scan(collection, **options) for record in page]


def filled(store: VectorStore, collection: str, count: int = 60, **changes: Any) -> list[Record]:
    schema = schema_of(collection, **changes)
    store.create(schema, FLAT)
    ids: list[Id] = [at - 20 for at in range(count)]
    if schema.id_type is IdType.VARCHAR:
        ids = [f"é{at}" if at % 3 else f"a{at}" for at in range(count)]
    records = records_of(ids)
    store.upsert(collection, records)
    return records


def in_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


#: The pieces of quotes, escapes, comments and formats.
HOSTILE = [
    '"',
    "'",
    "\\",
    "`",
    "%s",
    "{",
    "}",
    "$meta",
    "]",
    "[",
    "(",
    ")",
    " or ",
    " and ",
    " in ",
    "==",
    "--",
    "/*",
    "#",
    ";",
    "\t",
    "\n",
    "\r",
]
#: Of these, what Milvus Lite 2.5 refuses by name.
NOT_FOR_LITE_2 = {"'", "\n", "\r"}
HOSTILE += [
    "é",
    "e\u0301",
    "ß",
    "你",
    "😀",
    "\u202e",
    "\u2028",
    "\ufeff",
    "\x7f",
    "\x01",
    "null",
    "true",
    "0",
    "-1",
    "a",
    "B",
    " ",
]
