"""Workers as actors on a real Ray. Actors, nodes and the head die in the middle of a backfill: nothing is lost or found twice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.acceptance.conftest import IDS, NAIVE
from tests.support.application import Watch, searching
from tests.support.milvus_server import MilvusServer
from tests.support.on_servers import clear, make
from tests.support.postgres import PASSWORD
from tests.support.project import Project
from tests.support.ray_cluster import HEAD, NODE, RayCluster
from tests.support.waiting import wait_for_processes, wait_until

RAY = ("worker", "--engine", "ray")
#: As each process loads v2, it notes itself.
NOTED = """
import os
_v2 = v2


def v2():
    with (HERE / "loads.log").open("a") as log:
        log.write(f"{os.getpid()}\\n")
    return _v2()
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """A Ray without a node, whose drivers keep to the loopback, too."""
    for name, value in RayCluster.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with RayCluster() as made:
        yield made


@contextmanager
def moving(project: Project, *, slow: float) -> Iterator[Watch]:
    """Give an application that searches, while a backfill waits for workers whose embedder is slow. It must see no trouble."""
    project.ask(*NAIVE, "--detach")
    project.fault(v2={"slow": slow})
    with searching(project, IDS) as watch:
        yield watch
    assert watch.trouble == []
    assert watch.searches > 5


@contextmanager
def started(project: Project, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Give the command. At its end it must stop as it is asked to, after the batches in hand."""
    command = project.start(*RAY, *words)
    try:
        yield command
        command.send_signal(signal.SIGTERM)
        out, err = command.communicate(timeout=120)
    finally:
        command.kill()
    assert command.returncode == 0, out + err
    assert re.search(r" INFO \d workers ended$", out, re.MULTILINE), out
    assert "Traceback" not in out + err


def workers(project: Project) -> set[int]:
    """Return the processes that work on the upgrade."""
    return {int(name.split(":")[1]) for name in project.json("status")["workers"]}


def wait_for_share(project: Project, share: float) -> None:
    wait_for_processes(lambda: project.json("status")["t"] > share, seconds=300)


def expect_cut_over(project: Project) -> None:
    """Expect that everything moves, that nothing differs from what it was made from, and that no record is left over."""
    wait_until(lambda: project.json("status")["phase"] == "cut over", seconds=300)
    assert ": 0 differences" in project.ask("verify").stdout
    assert (project.json("status")["done"], project.json("status")["quarantined"]) == (len(IDS), 0)
    with project.client() as client:
        found = [hit.id for hit in client.search(project.models().item(1), limit=2 * len(IDS), consistency="Strong")]
    assert sorted(found) == IDS


def test_two_actors_upgrade_a_gallery_and_none_loads_the_model_twice(project: Project) -> None:
    models = project.folder / "models.py"
    models.write_text(models.read_text() + NOTED)
    seen = set[int]()
    with moving(project, slow=0.02), started(project, "--actors", "2"):
        wait_until(lambda: len(seen.update(workers(project)) or seen) == 2)
        expect_cut_over(project)
    loads = Counter(map(int, (project.folder / "loads.log").read_text().split()))
    # Searches rescore meanwhile: an actor that finds the embeddings of all its records kept needs no model.
    assert max(loads[pid] for pid in seen) == 1


def test_an_actor_that_is_killed_is_started_again(project: Project) -> None:
    with moving(project, slow=0.05), started(project, "--actors", "2"):
        wait_for_share(project, 0.05)
        doomed, *_ = first = workers(project)
        os.kill(doomed, signal.SIGKILL)
        wait_until(lambda: bool(workers(project) - first))
        expect_cut_over(project)


def test_an_actor_of_a_node_that_dies_is_started_again_on_another(project: Project, cluster: RayCluster) -> None:
    cluster.add()
    second = cluster.add()
    with moving(project, slow=0.15), started(project, "--actors", "2", "--address", cluster.address):
        wait_until(lambda: len(workers(project)) == 2)
        wait_for_share(project, 0.05)
        assert [cluster.runs(second, pid) for pid in workers(project)].count(True) == 1
        third = cluster.add()
        cluster.kill(second, NODE)
        wait_until(lambda: any(cluster.runs(third, pid) for pid in workers(project)))
        project.fault()
        expect_cut_over(project)


def test_when_the_head_dies_the_command_says_so_and_plain_workers_go_on(project: Project, cluster: RayCluster) -> None:
    head = cluster.add()
    cluster.add()
    with moving(project, slow=0.05):
        command = project.start(*RAY, "--actors", "2", "--address", cluster.address)
        wait_for_share(project, 0.05)
        cluster.kill(head, HEAD, NODE)
        out, err = command.communicate(timeout=120)
        assert command.returncode == 1, out + err
        assert re.search(
            r"^Error: Ray's head at 127\.0\.0\.1:\d+ has not answered for 20 s\. Nothing is lost: the leases of its batches "
            r"lapse after 9 s\. Run the same command again, or start plain workers: rmvdb worker$",
            err,
            re.MULTILINE,
        ), err
        assert "Traceback" not in out + err
        worker = project.start("worker")
        try:
            expect_cut_over(project)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.communicate(timeout=120)


def test_ray_keeps_for_each_actor_what_the_options_say_and_names_those_without_a_place(
    project: Project, cluster: RayCluster
) -> None:
    cluster.add(cpus=2, gpus=1)
    options = ("--actors", "3", "--num-gpus", "0.5", "--num-cpus", "0.25")
    with started(project, *options, "--address", cluster.address) as command:
        assert command.stdout is not None
        lines = iter(command.stdout.readline, "")
        assert "3 workers started on Ray" in next(lines)
        said = next(line for line in lines if "WARNING" in line)
        # On a busy machine those that have a place may not run yet, either.
        words = r" \d of 3 actors have not started yet: each needs 0\.25 CPU and 0\.5 GPU, and Ray has 2 CPU and 1 GPU\n$"
        assert re.search(words, said), said
        wait_until(lambda: (cluster.free().get("GPU", 0.0), cluster.free()["CPU"]) == (0.0, 1.5))


def test_files_are_refused_if_ray_has_several_machines(project: Project, cluster: RayCluster) -> None:
    cluster.add()
    cluster.add(host="elsewhere")
    refused = project.run(*RAY, "--address", cluster.address, code=2)
    assert re.search(
        r"^Error: Ray has nodes on 2 machines \(elsewhere, .+\), and registry\.url and milvus\.uri can be reached on one alone; "
        r"use PostgreSQL and a Milvus server, or start plain workers on that machine: rmvdb worker$",
        refused.stderr,
        re.MULTILINE,
    ), refused.stderr


@pytest.mark.server
@pytest.mark.postgres
def test_no_log_of_ray_holds_a_secret(
    tmp_path: Path, cluster: RayCluster, milvus_server: MilvusServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMVDB_MILVUS__TOKEN", "root:hidden-token")
    project = make(tmp_path / "project", milvus_server, postgres_url, ids=IDS[:60])
    monkeypatch.setenv("RMVDB_REGISTRY__URL", postgres_url)
    project.ask(*NAIVE, "--detach")
    cluster.add(cpus=2)
    command = project.start("-v", *RAY, "--actors", "2", "--address", cluster.address)
    try:
        wait_until(lambda: project.json("status")["phase"] == "cut over", seconds=300)
    finally:
        command.send_signal(signal.SIGTERM)
        said = "".join(command.communicate(timeout=120))
        print(said)  # noqa: T201 (pytest shows it if the test fails)
    logs = [path for path in cluster.folder.rglob("*") if path.is_file()]
    assert any("cut over" in path.read_text(errors="replace") for path in logs)
    for secret in (PASSWORD, "hidden-token"):
        assert secret not in said
        assert not [path for path in logs if secret.encode() in path.read_bytes()]
    clear(project)


def test_a_ray_that_is_not_there_is_named(project: Project) -> None:
    refused = project.run(*RAY, "--address", "127.0.0.1:9", code=1)
    assert "Error: No Ray answers at '127.0.0.1:9'; start it there, or name another with --address" in refused.stderr
    assert "Traceback" not in refused.stdout + refused.stderr
