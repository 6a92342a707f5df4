"""A client's own writes on a real Milvus server: each search shows them and nothing that they replaced, and waits once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import pytest

import rmvdb
from tests.acceptance.conftest import NAIVE
from tests.support.milvus_server import MilvusServer, unavailable
from tests.support.project import Project

pytestmark = pytest.mark.server
IDS = list(range(1, 201))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A gallery in the middle of its upgrade, on a server of which each strong search takes a second."""
    if reason := unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("own-writes")
    with MilvusServer(folder / "milvus", settings={"proxy.timeTickInterval": 1000, "common.session.ttl": 60}) as server:
        made = Project(folder / "project", milvus=server.address, batch=20, retry_for=60.0)  # on a busy machine, too
        settings = made.folder / "rmvdb.toml"
        settings.write_text(settings.read_text().replace("longest_search = 1.5", "longest_search = 10.0"))
        made.prepare(IDS)
        made.ask(*NAIVE, "--until", "0.5")
        yield made


def found(client: rmvdb.Client, item: object, **options: object) -> list[int]:
    return [int(hit.id) for hit in client.search(item, limit=5, **options)]  # type: ignore[call-overload]


def test_every_search_shows_what_its_client_wrote_a_moment_before(project: Project) -> None:
    """Records that have moved, records that have not, new ones, deleted and replaced ones, by four threads of one client."""
    models = project.models()
    with project.client() as client:
        assert len(client.plan.legs) == 2

        def write(thread: int) -> list[str]:
            wrong = []
            for turn in range(6):
                id = IDS[thread * 40 + turn * 6]
                edition = 10 + turn
                old, new = models.item(id, 0), models.item(id, edition)
                client.upsert({"id": id, "item": new})
                hits = client.search(new, limit=3)
                if hits[0].id != id or min(hit.raw for hit in hits if hit.id == id) > 1e-3:
                    wrong.append(f"{id} is not shown as it was written: {hits}")
                if any(hit.id == id and hit.raw < 1e-3 for hit in client.search(old, limit=10)):
                    wrong.append(f"{id} is shown as it was before")
                client.delete(id)
                if id in found(client, new):
                    wrong.append(f"{id} is shown though it was deleted")
                client.upsert({"id": 1000 + id, "item": new})
                if found(client, new)[0] != 1000 + id:
                    wrong.append(f"{1000 + id} is not shown")
            return wrong

        with ThreadPoolExecutor(4) as pool:
            assert [each for wrong in pool.map(write, range(4)) for each in wrong] == []


def test_only_the_first_search_after_a_write_waits(project: Project) -> None:
    models = project.models()
    item = models.item(3, 77)
    with project.client() as client:
        for write in (lambda: client.upsert({"id": 7, "item": item}), lambda: client.delete(9)):
            write()
            waited = seconds(client, item)
            later = [seconds(client, item) for _ in range(7)]
            strong = [seconds(client, item, consistency="Strong") for _ in range(3)]
            assert median(later) < median(strong) / 3, (waited, later, strong)


def seconds(client: rmvdb.Client, item: object, **options: object) -> float:
    began = time.monotonic()
    found(client, item, **options)
    return time.monotonic() - began


def test_a_write_that_failed_at_its_end_shows_what_it_had_written(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller does not know what became of it, and sees it as it is."""
    models = project.models()
    item = models.item(5, 78)
    with project.client() as client:
        monkeypatch.setattr("rmvdb.registry.registry.Registry.close_intents", lambda *_, **__: False)
        with pytest.raises(rmvdb.errors.EngineError, match="repeat the write"):
            client.upsert({"id": 5, "item": item})
        assert found(client, item)[0] == 5


def test_a_search_of_another_client_shows_a_write_within_the_staleness(project: Project, tmp_path: Path) -> None:
    """Though it has written itself before, and waits for its own write alone."""
    models = project.models()
    item = models.item(11, 79)
    with project.client() as writer, project.client() as other:
        other.upsert({"id": 3000, "item": models.item(3000)})
        found(other, item)
        writer.upsert({"id": 11, "item": item})
        end = time.monotonic() + other.plan.staleness
        while found(other, item)[0] != 11:
            assert time.monotonic() < end + 2.0
            time.sleep(0.1)
