"""The main job on a real Milvus server and PostgreSQL; either may go away and come back."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from pymilvus import MilvusClient

import rmvdb
import rmvdb.app
from rmvdb import errors
from rmvdb.engines.milvus import MilvusStore
from tests.acceptance.conftest import NAIVE
from tests.support.application import searching
from tests.support.milvus_server import MilvusServer
from tests.support.on_servers import IDS, LONGER, PATIENT, clear, make
from tests.support.postgres import PASSWORD, Postgres
from tests.support.project import Project
from tests.support.records import HOSTILE
from tests.support.waiting import wait_for_processes

pytestmark = [pytest.mark.server, pytest.mark.postgres]


def test_a_gallery_on_a_server_is_upgraded_and_rolled_back(
    tmp_path: Path, milvus_server: MilvusServer, postgres_url: str
) -> None:
    project = make(tmp_path, milvus_server, postgres_url)
    assert project.ask("doctor").stdout.count("FAIL") == 0
    client = _pymilvus(milvus_server)
    first = project.json("gallery", "show")["collections"][0]["name"]
    client.create_alias(first, "photos")
    with searching(project, IDS) as watch:
        out = project.run(*NAIVE, timeout=300).stdout
        new = client.describe_alias("photos")["collection_name"]
        assert new != first
        assert f"the alias photos now stands for {new}" in out
        project.run("rollback", timeout=300)
        assert client.describe_alias("photos")["collection_name"] == first
        project.ask("cleanup", "--yes")
    assert watch.trouble == []
    client.drop_alias("photos")
    client.close()
    assert watch.searches > 5
    assert {each["model"]: each["records"] for each in project.json("gallery", "show")["collections"]} == {"v1": 200}
    clear(project)


def test_a_gallery_with_an_index_of_lists_is_upgraded(tmp_path: Path, milvus_server: MilvusServer, postgres_url: str) -> None:
    """Its searches with a filter find a part of the matches, without rmvdb, too. No record is missing for that."""
    ids = list(range(1, 2_501))
    lists = 'type = "IVF_FLAT"\nparams = { nlist = 64 }\nsearch = { nprobe = 2 }'
    project = make(
        tmp_path,
        milvus_server,
        postgres_url,
        ids=ids,
        changed={**LONGER, 'type = "AUTOINDEX"': lists, "batch = 50": "batch = 500"},
    )
    assert "cut over: 2500 records verified" in project.run(*NAIVE, timeout=600).stdout
    new = project.json("gallery", "show")["collections"][-1]["name"]
    client = _pymilvus(milvus_server)
    assert client.describe_index(new, "vector")["index_type"] == "IVF_FLAT"
    client.close()
    with project.client() as application:
        query = project.models().item(7)
        # Once the server has built the index and loaded it. Before that it compares every record.
        wait_for_processes(lambda: len(application.search(query, limit=1_000, filter="id <= 1000")) < 1_000)
    clear(project)


def test_fifty_threads_search_on_through_cut_over_and_clean_up(
    tmp_path: Path, milvus_server: MilvusServer, postgres_url: str
) -> None:
    """Five applications of ten threads; each answer is the whole gallery, and none fails."""
    project = make(tmp_path, milvus_server, postgres_url, changed=PATIENT)
    models, stop = project.models(), threading.Event()
    wrong: list[str] = []
    answers: Counter[int] = Counter()

    def search(client: rmvdb.Client, at: int) -> None:
        while not stop.is_set():
            try:
                found = [hit.id for hit in client.search(models.item(IDS[at]), limit=250)]
                answers[client.plan.epoch] += 1
            except Exception as exc:  # noqa: BLE001 (whatever it is, a search failed)
                wrong.append(repr(exc))
                continue
            time.sleep(1.0)  # the upgrade needs a share of the machine, too
            if sorted(found) != IDS:
                wrong.append(f"{len(found)} hits, missed {sorted(set(IDS) - set(found))[:5]}")

    clients = [project.client() for _ in range(5)]
    clients[0].search(models.item(1), limit=250, consistency="Strong")  # from here on every search shows what was written
    threads = [threading.Thread(target=search, args=(clients[at % 5], at)) for at in range(50)]
    for thread in threads:
        thread.start()
    try:
        wait_for_processes(lambda: answers[1] >= 50)
        assert "cut over: 200 records verified" in project.run(*NAIVE, timeout=200).stdout
        project.run("cleanup", "--yes")
        before = answers.total()
        wait_for_processes(lambda: answers.total() >= before + 100)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()
    assert wrong == []
    assert len(answers) == 3  # the old collection, both, the new one
    assert {each["model"]: each["records"] for each in project.json("gallery", "show")["collections"]} == {"v2": 200}
    clear(project)


def test_a_gallery_of_hostile_ids_is_written_upgraded_and_rolled_back(
    tmp_path: Path, milvus_server: MilvusServer, postgres_url: str
) -> None:
    random = Random(7)
    ids = sorted({"".join(random.choices(HOSTILE, k=random.randint(1, 9))) for _ in range(220)})[:200]
    project = make(tmp_path, milvus_server, postgres_url, ids=ids)
    with searching(project, ids) as watch:
        project.ask(*NAIVE, "--until", "0.5")
        with project.client() as client:
            models = project.models()
            client.upsert([{"id": id, "item": models.item(id), "label": 7} for id in ids[::3]])
            with pytest.raises(errors.Mismatch, match=r"The id 'a\\x00b' cannot be stored: it contains NUL"):
                client.upsert([{"id": "a\0b", "item": models.item("b"), "label": 1}])
        project.ask(*NAIVE)
        project.ask("rollback")
    assert watch.trouble == []
    with project.client() as client:
        assert {record.id: record.fields["label"] for record in client.get(ids)} == {
            id: 7 if at % 3 == 0 else models.label(id) for at, id in enumerate(ids)
        }
    clear(project)


def test_a_collection_that_is_not_loaded_says_so(tmp_path: Path, milvus_server: MilvusServer, postgres_url: str) -> None:
    project = make(tmp_path, milvus_server, postgres_url)
    name = project.json("gallery", "show")["collections"][0]["name"]
    client = _pymilvus(milvus_server)
    client.release_collection(name)
    done = project.ask(*NAIVE, code=1)
    assert "load" in done.stderr
    assert "Traceback" not in done.stderr
    client.load_collection(name)
    client.close()
    project.ask(*NAIVE)
    clear(project)


def test_a_collection_of_many_fresh_rows_is_named_and_settled(
    tmp_path: Path, milvus_server: MilvusServer, postgres_url: str
) -> None:
    """A server searches them in part if a filter is selective."""
    project = make(tmp_path, milvus_server, postgres_url, ids=range(1, 3_001))
    held = project.json("gallery", "show")["collections"][0]["name"]
    unsettled = (
        "3000 rows are not flushed, and a search with a filter may miss some of them; to flush and index them: rmvdb gallery"
    )
    doctor = project.ask("doctor").stdout
    assert f"{unsettled} settle things" in doctor
    project.ask("gallery", "remove", "things", "--yes")
    adopted = project.ask("gallery", "add", "mine", "--model", "v1", "--collection", held, "--source", "call:models:items").stdout
    assert f"{unsettled} settle mine" in adopted

    done = project.ask("gallery", "settle", "mine")

    assert done.stdout == "gallery mine: searches find 3000 records\n"
    assert "indexing" in done.stderr
    assert "not flushed" not in project.ask("doctor").stdout
    assert project.ask("gallery", "settle").stdout == done.stdout
    clear(project)


def test_work_goes_on_by_itself_when_the_server_comes_back(
    tmp_path: Path, own_milvus_server: MilvusServer, postgres_url: str
) -> None:
    project = make(tmp_path, own_milvus_server, postgres_url, retry_for=90.0)
    project.fault(v2={"slow": 0.02})
    upgrade = project.start(*NAIVE, "--sample", "70")
    wait_for_processes(lambda: project.json("status")["done"] > 0)
    own_milvus_server.stop(kill=True)
    time.sleep(1)
    own_milvus_server.start()
    out, err = upgrade.communicate(timeout=240)
    assert upgrade.returncode == 0, out + err
    assert project.json("status")["phase"] == "cut over"
    with project.client() as client:
        assert client.count() == 200


def test_a_server_that_stays_away_stops_the_upgrade_which_can_be_continued(
    tmp_path: Path, own_milvus_server: MilvusServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make(tmp_path, own_milvus_server, postgres_url)
    own_milvus_server.stop(kill=True)
    monkeypatch.setenv("RMVDB_BACKFILL__RETRY_FOR", "3.0")
    done = project.run(*NAIVE, code=1)
    monkeypatch.delenv("RMVDB_BACKFILL__RETRY_FOR")
    assert done.stderr.count("Error: ") == 1
    assert "Traceback" not in done.stderr
    own_milvus_server.start()
    wait_for_processes(lambda: project.run(*NAIVE, code=None, timeout=300).returncode == 0, seconds=200)


def test_the_database_may_stop_and_start(tmp_path: Path, milvus_server: MilvusServer, stoppable_postgres: Postgres) -> None:
    project = make(tmp_path, milvus_server, stoppable_postgres.database(), retry_for=90.0)
    project.fault(v2={"slow": 0.02})
    upgrade = project.start(*NAIVE, "--sample", "70")
    wait_for_processes(lambda: project.json("status")["done"] > 0)
    stoppable_postgres.stop()
    time.sleep(2)
    stoppable_postgres.start()
    out, err = upgrade.communicate(timeout=240)
    assert (upgrade.returncode, PASSWORD in out + err) == (0, False), err
    assert project.json("status")["phase"] == "cut over"
    stoppable_postgres.stop()
    refused = Project(tmp_path / "late", registry=stoppable_postgres.url("gone"), retry_for=1.0).run("gallery", "list", code=1)
    assert PASSWORD not in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr
    stoppable_postgres.start()
    clear(project)


def test_no_more_rights_are_needed_than_readme_names(
    tmp_path: Path, request: pytest.FixtureRequest, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue("milvus_server")  # skips if there can be none
    settings = {"common.security.authorizationEnabled": "true"}
    with MilvusServer(tmp_path / "milvus", settings=settings) as server:
        administrator = MilvusClient(uri=server.address, token="root:Milvus")
        application = _rights("application")
        _user(administrator, "application", application)
        _user(administrator, "worker", application + _rights("command line, workers"))
        monkeypatch.setenv("RMVDB_MILVUS__TOKEN", "worker:word-worker")
        project = make(tmp_path / "project", server, postgres_url)
        project.run(*NAIVE, "--until", "0.5", "--no-cutover")
        with monkeypatch.context() as patch:
            patch.setenv("RMVDB_MILVUS__TOKEN", "application:word-application")
            with project.client() as client:
                models = project.models()
                client.upsert([{"id": id, "item": models.item(id), "label": 0} for id in (1, 1000)])
                client.delete([2])
                assert {hit.id for hit in client.search(models.item(1), limit=300)} == {*IDS, 1000} - {2}
                assert client.count() == len(client.query(limit=300)) == len(IDS)
                with pytest.raises(errors.EngineError, match="refused"):
                    client._store.drop(client.plan.legs[0].collection)
        assert project.run("doctor").stdout.count("FAIL") == 0
        project.run(*NAIVE)
        project.run("rollback")
        project.run("cleanup", "--yes")


def _rights(who: str) -> list[str]:
    """Return the rights that the table of least privileges names for them."""
    page = (Path(rmvdb.__file__).parents[1] / "docs" / "how-to" / "least-privileges.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith(f"| {who} |")]
    return re.findall(r"[A-Z]\w+", row.split("|")[2])


def _user(administrator: MilvusClient, name: str, rights: Sequence[str]) -> None:
    administrator.create_user(name, f"word-{name}")
    administrator.create_role(name)
    everywhere = {"DescribeCollection", "CreateCollection", "DropCollection", "ShowCollections", "CreateAlias"}
    for right in rights:
        administrator.grant_privilege(name, "Global" if right in everywhere else "Collection", right, "*")
    administrator.grant_role(name, name)


def _pymilvus(server: MilvusServer) -> MilvusClient:
    """Return an administrator's own connection."""
    store = MilvusStore(lambda: server.address)
    return store._connection.get()
