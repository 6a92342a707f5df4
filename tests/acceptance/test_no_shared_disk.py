"""Machines that share PostgreSQL, a Milvus server and a bucket of S3, and no disk."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmvdb.types import Phase
from tests.acceptance.conftest import NAIVE
from tests.support.application import searching
from tests.support.milvus_server import MilvusServer
from tests.support.project import Project
from tests.support.s3 import S3Server

IDS = list(range(1, 401))
pytestmark = [pytest.mark.server, pytest.mark.postgres]


@pytest.fixture
def machine(
    tmp_path: Path, milvus_server: MilvusServer, postgres_url: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Project]]:
    """Make a machine: a folder with rmvdb.toml and models.py, and nothing else."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    home = f"s3://{s3_server.make_bucket()}/rmvdb"
    made: list[Project] = []

    def make(name: str) -> Project:
        project = Project(tmp_path / name, milvus=milvus_server.address, registry=postgres_url, batch=20, retry_for=30.0)
        settings = project.folder / "rmvdb.toml"
        settings.write_text(f'home = "{home}"\n{settings.read_text()}')
        made.append(project)
        return project

    yield make
    with made[0].opened() as opened:
        for gallery in opened.registry.galleries():
            for row in opened.registry.collections(gallery.id):
                opened.store.drop(row.name)


def own_files(project: Project) -> set[str]:
    """Return the folders of rmvdb's files on this machine's disk."""
    home = project.folder / ".rmvdb"
    return {path.relative_to(home).parts[0] for path in home.rglob("*") if path.is_file()}


def test_two_workers_and_two_applications_share_no_disk(machine: Callable[[str], Project], tmp_path: Path) -> None:
    operator = machine("operator").prepare(IDS)
    assert "rmvdb can be listed, read, written and cleared" in operator.ask("doctor").stdout
    workers = [machine("one worker"), machine("another worker")]
    searcher, writer = machine("an application that searches"), machine("an application that writes")
    models = operator.models()

    operator.ask(*NAIVE, "--detach")
    operator.ask("throttle", "--rate", "60")
    with searching(searcher, IDS) as watch, writer.client() as client:
        running = [worker.start("worker") for worker in workers]
        wait(lambda: operator.json("status")["t"] > 0.3)
        os.kill(running[0].pid, signal.SIGKILL)
        client.upsert([{"id": id, "item": models.item(id), "label": 5} for id in IDS[:10]])
        client.upsert([{"id": 1000, "item": models.item(1000)}])
        client.delete([1000])
        operator.ask("throttle", "--rate", "0")
        running[0] = workers[0].start("worker")
        wait(lambda: operator.json("status")["phase"] == Phase.CUT_OVER)
        assert {each.fields["label"] for each in client.get(IDS[:10])} == {5}
    assert watch.trouble == []
    assert watch.searches > 5
    for process in running:
        process.send_signal(signal.SIGINT)
    assert [process.wait(60) for process in running] == [0, 0]

    assert searcher.json("verify")["problems"] == 0
    everybody = [operator, *workers, searcher, writer]
    assert set().union(*map(own_files, everybody)) <= {"artifacts", "cache"}
    assert not [path for project in everybody for path in project.folder.rglob("*.parquet")]
    with writer.opened() as opened:
        kept = {entry.path.split("/")[0] for entry in opened.home.entries()}
        assert {"manifest.json", "archive"} <= kept

    # The database is lost. Another machine brings the registry back from the bucket, and rolls back with its archive.
    lost = machine("the machine after the loss")
    settings = lost.folder / "rmvdb.toml"
    with lost.opened() as opened:
        settings.write_text(
            settings.read_text().replace(
                opened.settings.registry.url.get_secret_value(), f"sqlite:///{tmp_path}/made-again.sqlite"
            )
        )
    lost.ask("init")
    lost.ask("registry", "rebuild")
    lost.ask("rollback")
    assert lost.json("verify")["problems"] == 0
    with lost.client() as client:
        assert sorted(hit.id for hit in client.search(models.item(50), limit=500)) == IDS
    lost.ask("cleanup", "--yes")
    with lost.opened() as opened:
        assert not opened.home.has("archive/things")


def test_psi_comes_back_from_the_bucket_if_the_registry_and_every_machine_are_lost(
    machine: Callable[[str], Project], tmp_path: Path
) -> None:
    """The registry holds the transforms, and each machine keeps copies. The bucket must not need either."""
    operator = machine("operator").prepare(IDS)
    models = operator.models()
    operator.ask(
        "upgrade", "--from", "v1", "--to", "v2", "--labels", "label", "--method", "ridge", "--until", "0.5", "--accept-risk"
    )
    with operator.client() as client:
        before = [[hit.id for hit in client.search(models.item(id), limit=10)] for id in IDS[:20]]

    lost = machine("the machine after the loss")
    settings = lost.folder / "rmvdb.toml"
    with operator.opened() as opened:
        url = opened.settings.registry.url.get_secret_value()
    settings.write_text(settings.read_text().replace(url, f"sqlite:///{tmp_path}/made-again.sqlite"))
    lost.ask("init")
    lost.ask("registry", "rebuild")
    with lost.client() as client:
        assert len(client.plan.legs) == 2
        assert [[hit.id for hit in client.search(models.item(id), limit=10)] for id in IDS[:20]] == before


def wait(done: Callable[[], bool], *, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.3)
