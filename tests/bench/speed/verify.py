"""The comparison before a cut-over on a real server, against reading as many records twice: both collections once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from pymilvus import MilvusClient

from rmvdb.engines.milvus import MilvusStore
from rmvdb.types import Index
from rmvdb.upgrade.compare import Verify
from tests.bench.speed.listing import read
from tests.bench.speed.moving import SHORT, Given, Moving
from tests.bench.speed.row import Options, Row, compared, in_turns
from tests.bench.speed.world import COLLECTIONS, vectors, world
from tests.bench.speed.writes import SETTINGS
from tests.support.milvus_server import MilvusServer


def measure(options: Options) -> Iterator[Row]:
    """Move all records, then compare them."""
    whole = Options(records=options.records, dim=options.dim, t=0.0)
    with (
        tempfile.TemporaryDirectory(prefix="rmvdb-bench-") as folder,
        MilvusServer(Path(folder), settings=SETTINGS) as server,
        tempfile.TemporaryDirectory(prefix="rmvdb-bench-") as archive,
    ):
        store, bare = MilvusStore(lambda: server.address, timeout=60.0), MilvusClient(uri=server.address)
        try:
            with world(store, whole, index=Index(type="FLAT"), times=SHORT) as made:
                made.client.close()
                source = Given(vectors(whole.records, whole.dim, seed=1))
                moving = Moving(made, Path(archive), source, made.loaded_models)
                moving.add(range(whole.records))
                moving.run()
                check = Verify(
                    registry=made.registry, store=store, loaded_models=made.loaded_models, source=source, archive=moving.archive
                )

                def ours() -> None:
                    report = check.run(moving.task)
                    assert report.ok, report.examples
                    assert report.records == whole.records

                def theirs() -> None:
                    assert read(bare, COLLECTIONS[0]) + read(bare, COLLECTIONS[0]) == 2 * whole.records

                sides = in_turns(ours, theirs, calls=2)
        finally:
            store.close()
    name = f"verify, {options.records:,} × {options.dim}"
    yield compared(name, *sides, against="as many ids and vectors read twice", target=1.5)
