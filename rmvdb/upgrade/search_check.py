"""Searches for records that are known to be there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rmvdb.engines.finding import TOGETHER, NotFound, not_found
from rmvdb.protocols import VectorStore
from rmvdb.registry.codec import schema_from_json
from rmvdb.registry.registry import Registry
from rmvdb.types import Id, Moment, Record, Schema
from rmvdb.upgrade.report import VerifyReport

#: Seconds after which a record that a search has missed is searched for again.
_AGAIN_AFTER = 1.0


def search(
    store: VectorStore,
    registry: Registry,
    records_by_collection: Mapping[str, Sequence[Record]],
    report: VerifyReport,
    *,
    after: Moment = 0,
) -> None:
    """Search for records by their own vectors: with a filter by key, with one by a field, and without a filter.

    `after`: the moment that the searches show every write before; after 0 they are strong.
    """
    for name, records in records_by_collection.items():
        row = registry.collection(name)
        schema = schema_from_json(row.schema)
        for start in range(0, len(records), TOGETHER):
            some = records[start : start + TOGETHER]
            missed = _missed(store, schema, some, row.search, after)
            for id, how in missed.hidden.items():
                report.complain(_sentence(name, id, how))
            report.pass_over([_sentence(name, id, how) for id, how in missed.passed_over.items()])
            report.searched += len(some)


def _sentence(collection: str, id: Id, how: str) -> str:
    return f"record {id!r} is in {collection}, and {how}; look at its index"


def _missed(store: VectorStore, schema: Schema, records: Sequence[Record], params: Mapping[str, Any], after: Moment) -> NotFound:
    """Return the records that searches still miss once the engine has flushed and indexed everything, and how they miss them."""
    missed = not_found(store, schema, records, search=params, after=after)
    for waited in (False, True):
        if not (missed.hidden if waited else any(missed)):
            break
        if waited:
            store.settle(schema.collection, missed=True)
        else:  # a client may have written or deleted it since
            time.sleep(_AGAIN_AFTER)
        records = store.get(schema.collection, [each.id for each in records], vector=True)
        missed = not_found(store, schema, records, search=params)
    return missed
