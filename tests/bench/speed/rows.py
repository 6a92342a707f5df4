"""The rows of `make bench`: a family of rows is a file here, and a line in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tests.bench.speed import (
    claims,
    copying,
    importing,
    listing,
    memory,
    on_ray,
    own_time,
    search,
    statements,
    statements_per_batch,
    transforms,
    verify,
    writes,
)
from tests.bench.speed.row import Options, Row

#: Each family measures its rows one after the other. The order is that of the table.
FAMILIES: Mapping[str, Callable[[Options], Iterator[Row]]] = {
    "search": search.measure,
    "writes": writes.measure,
    "own_time": own_time.measure,
    "transforms": transforms.measure,
    "importing": importing.measure,
    "statements": statements.measure,
    "listing": listing.measure,
    "copying": copying.measure,
    "verify": verify.measure,
    "claims": claims.measure,
    "memory": memory.measure,
    "statements_per_batch": statements_per_batch.measure,
    "on_ray": on_ray.measure,
}
