"""The worlds in which processes die.

All deaths of a file happen at the same time, in threads of their own, since most of each is waiting for a lease. So one process
takes a whole file, and never a case alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from rmvdb.registry import plans, schema
from rmvdb.registry.registry import Registry
from rmvdb.serving import announced_writes as writing_room
from rmvdb.storage.bucket import Bucket
from rmvdb.types import IdType, Metric, Schema
from rmvdb.upgrade import leadership
from tests.support.inprocess import DIMS, TIMES
from tests.support.s3 import S3Server
from tests.support.stories import Outcomes, cases, die_and_do_it_again, world


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with both versions and no gallery."""
    file = tmp_path_factory.mktemp("template") / "registry.sqlite"
    url = f"sqlite:///{file}"
    schema.upgrade(url)
    registry = Registry(url)
    for name, dim in DIMS.items():
        registry.add_version(
            name=name, embedder=f"tests:{name}", options={}, classifier=None, dim=dim, metric="COSINE", fingerprint=None,
            probes=None, probe_kind=None, base=None, head=None,
        )  # fmt: skip
    old = Schema(collection="texts_v1", dim=DIMS["v1"], metric=Metric.COSINE, id_type=IdType.INT64)
    registry.add_gallery(name="texts", model="v1", schema=old, adopted=False, source="tests", search={}, times=TIMES)
    registry.engine.dispose()
    return file


@pytest.fixture(scope="module", autouse=True)
def _impatient() -> Iterator[None]:
    """Waits that are made for people, shortened; what they wait for is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "CLOSING", 0.3)
        patch.setattr(leadership, "LEADER_LEASE", 0.8)
        patch.setattr(writing_room, "WRITE_LASTS", 15.0)
        yield


@pytest.fixture(scope="module")
def outcomes(
    template: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, s3_server: S3Server
) -> Iterator[Outcomes]:
    """Every death of this file that is asked for, all under way. Every other world keeps its archive in a bucket."""
    folder, stories = tmp_path_factory.mktemp("worlds"), request.module.STORIES
    items = (getattr(item, "callspec", None) for item in request.session.items)
    asked = [item.params.get("case") for item in items if item]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(max_workers=8) as pool:
        for name, value in s3_server.environment.items():
            patch.setenv(name, value)
        bucket = Bucket(f"s3://{s3_server.make_bucket()}", patience=20.0)
        archives = (bucket.folder(str(at)) if at % 2 else None for at in count())
        yield {
            case: pool.submit(die_and_do_it_again, world(template, folder / str(at), next(archives)), stories[case[0]], case[1:])
            for at, case in enumerate(cases(stories))
            if case in asked
        }
