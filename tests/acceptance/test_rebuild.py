"""The registry is deleted in the middle of an upgrade, `rmvdb registry rebuild` brings it back, and the upgrade goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rmvdb
from rmvdb import errors
from rmvdb.app.wiring import App
from rmvdb.types import BatchState, Id, Record
from tests.acceptance.conftest import IDS, TRAINED
from tests.support.application import searching
from tests.support.postgres import Postgres
from tests.support.project import Project
from tests.support.waiting import wait_for_processes

#: The label of everything that a client wrote.
WRITTEN = 77


@dataclass
class Middle:
    """A gallery in the middle of an upgrade whose process was killed, and an application that is connected to it."""

    project: Project
    app: Any
    client: rmvdb.Client
    #: Of v1, as they were before.
    before: dict[Id, Record]
    #: Ids in the new collection alone, in both, and in the old one alone.
    moved: list[Id]
    both: list[Id]
    left: list[Id]
    #: Writes of a client since then.
    written: set[Id] = field(default_factory=set)

    def write(self, *, unknown_to_source: bool) -> dict[Id, Any]:
        """Write and delete everywhere. Return the item of every record that should be there then."""
        models = self.project.models()
        items = {id: models.item(id) for id in self.before}
        places = (self.moved, self.both, self.left)
        self.project.editions(**{str(ids[0]): 1 for ids in places})
        written: dict[Id, Any] = {ids[0]: models.item(ids[0], 1) for ids in places}
        if unknown_to_source:
            written |= {ids[1]: models.item(ids[1], 2) for ids in places}
        written |= {ids[2]: items[ids[2]] for ids in places} | {1001: models.item(1001)}
        self.client.upsert([{"id": id, "item": item, "label": WRITTEN} for id, item in written.items()])
        deleted = [ids[3] for ids in places]
        self.client.delete(deleted)
        self.written = set(written)
        return {id: item for id, item in (items | written).items() if id not in deleted}

    def close(self) -> None:
        """End the application."""
        self.client.close()
        self.app.close()

    def label(self, id: Id) -> int:
        """Return the value of the field."""
        return WRITTEN if id in self.written else self.project.models().label(id)


def middle(project: Project, ids: list[int]) -> Middle:
    """Moved by a throttled upgrade that is killed: records of each kind."""
    app = project.app()
    old = app.registry.plan("things").legs[0].collection
    before = {record.id: record for record in app.store.get(old, ids, vector=True)}
    project.ask(*TRAINED, "--until", "0", "--no-cutover")
    project.ask("throttle", "--rate", "15")
    upgrade = project.start(*TRAINED)
    running = app.registry.upgrades()[-1].id
    wait_for_processes(lambda: {BatchState.RETIRED, BatchState.COPIED, BatchState.PENDING} <= app.registry.counts(running).keys())
    upgrade.kill()
    upgrade.communicate()
    project.ask("throttle", "--rate", "0")
    there = {row.model: {record.id for page in app.store.scan(row.name) for record in page} for row in _collections(app)}
    old_ids, new_ids = there.pop("v1"), *there.values()
    found = Middle(
        project=project,
        app=app,
        client=project.client(),
        before=before,
        moved=sorted(new_ids - old_ids),
        both=sorted(new_ids & old_ids),
        left=sorted(old_ids - new_ids),
    )
    assert min(len(found.moved), len(found.both), len(found.left)) >= 4
    return found


def remove_sqlite(project: Project) -> None:
    """Delete the registry while an application has it open."""
    for path in sorted((project.folder / ".rmvdb").glob("registry.sqlite*"), reverse=True):  # a heartbeat makes it again
        path.unlink(missing_ok=True)


def lose(found: Middle, remove: Callable[[], None]) -> str:
    """Lose the registry and rebuild it. The application refuses meanwhile, then goes on. Return the command's output."""
    max_age = found.client.plan.max_age
    remove()
    time.sleep(max_age + 0.2)
    with pytest.raises(errors.StalePlan):
        found.client.search(found.project.models().item(5))
    said = found.project.ask("status", code=1).stderr
    assert "rmvdb registry rebuild if it was lost" in said
    return found.project.run("registry", "rebuild").stdout


def expect_upgraded(found: Middle, items: dict[Id, Any]) -> None:
    """Expect every record in the new collection as v2 embeds its item, and nowhere else."""
    app = found.app
    (leg,) = app.registry.plan("things").legs
    held = {record.id: record for page in app.store.scan(leg.collection, fields=None, vector=True) for record in page}
    assert held.keys() == items.keys()
    assert {id: record.fields["label"] for id, record in held.items()} == {id: found.label(id) for id in items}
    own = app.loaded_models.apply_head(leg.model, app.loaded_models.embed("v2", list(items.values())))
    assert {id: cosine(held[id], vector) for id, vector in zip(items, own, strict=True)} == pytest.approx(
        dict.fromkeys(items, 1.0), abs=1e-5
    )
    assert [app.store.count(row.name) for row in _collections(app) if row.model == "v1"] == [0]


def expect_rolled_back(found: Middle, items: dict[Id, Any]) -> None:
    """Expect every record in the old collection as it was, or as v1 embeds its newer item."""
    app = found.app
    (leg,) = app.registry.plan("things").legs
    held = {record.id: record for page in app.store.scan(leg.collection, fields=None, vector=True) for record in page}
    assert leg.model == "v1"
    assert held.keys() == items.keys()
    assert {id: record.fields["label"] for id, record in held.items()} == {id: found.label(id) for id in items}
    for id in items.keys() - found.written:
        assert np.array_equal(held[id].vector, found.before[id].vector), id
    own = app.loaded_models.embed("v1", [items[id] for id in found.written])
    assert [cosine(held[id], vector) for id, vector in zip(found.written, own, strict=True)] == pytest.approx(
        [1.0] * len(found.written), abs=1e-5
    )


def test_an_upgrade_goes_on_after_its_registry_was_deleted(planned: Project) -> None:
    project = planned
    found = middle(project, IDS)
    items = found.write(unknown_to_source=True)
    said = lose(found, lambda: remove_sqlite(project))
    assert "waiting 30 s" in said
    assert "gallery things: continue with rmvdb upgrade --from v1 --to v2" in said
    assert (
        f"{project.json('status')['done']} re-embedded, the rest is not listed yet; 0 quarantined" in project.ask("status").stdout
    )
    query = project.models().item(5)
    hits = found.client.search(query, limit=1000)
    assert sorted(hit.id for hit in hits) == sorted(items)
    found.client.upsert([{"id": 2001, "item": project.models().item(2001), "label": WRITTEN}])
    items[2001], found.written = project.models().item(2001), found.written | {2001}
    with searching(project, list(items)) as watch:
        project.run(*TRAINED)
    assert watch.trouble == []
    assert watch.searches > 5
    status = project.json("status")
    assert (status["phase"], status["t"], status["upgrade"]) == ("cut over", 1.0, 1)
    assert project.json("verify", "--sample", "1000")["problems"] == 0
    expect_upgraded(found, items)
    assert sorted(hit.id for hit in found.client.search(query, limit=1000)) == sorted(items)
    found.close()
    refused = project.ask("registry", "rebuild", code=2).stderr
    assert "holds gallery 'things'; only an empty one is rebuilt" in refused
    assert "brought back by registry rebuild" in project.ask("history").stdout
    project.ask("cleanup", "--yes")


def test_a_roll_back_after_the_registry_was_deleted_gives_back_what_there_was(planned: Project) -> None:
    project = planned
    found = middle(project, IDS)
    items = found.write(unknown_to_source=False)
    lose(found, lambda: remove_sqlite(project))
    with searching(project, list(items)) as watch:
        project.run("rollback")
    assert watch.trouble == []
    expect_rolled_back(found, items)
    found.close()
    project.ask("cleanup", "--yes")


@pytest.mark.postgres
def test_the_tables_of_postgresql_are_dropped_in_the_middle(tmp_path: Path, postgres: Postgres, postgres_url: str) -> None:
    ids = list(range(1, 301))
    project = Project(tmp_path, registry=postgres_url, batch=30).prepare(ids)
    found = middle(project, ids)
    items = found.write(unknown_to_source=True)
    lose(found, lambda: postgres.empty("test"))
    with searching(project, list(items)) as watch:
        project.run(*TRAINED)
    assert watch.trouble == []
    expect_upgraded(found, items)
    found.close()
    project.stop_engine()


def test_a_command_on_a_lost_registry_says_how_to_bring_it_back(project: Project) -> None:
    remove_sqlite(project)
    project.ask("init")
    for words in (("status",), ("model", "add", "v1", "--embedder", "models:v1")):
        said = project.ask(*words, code=1).stderr
        assert "does not know gallery things" in said
        assert "bring it back: rmvdb registry rebuild" in said
    assert "FAIL  registry: The registry does not know gallery things" in project.ask("doctor", code=1).stdout
    project.ask("registry", "rebuild")
    assert [row["name"] for row in project.json("model", "list")] == ["v1", "v2"]
    with project.client() as client:
        assert client.count() == 400


def test_a_rebuild_of_what_is_rebuilt_shares_the_artifacts_all_the_same(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier run may have been killed after all else, and other machines need the artifacts."""
    shared: list[App] = []
    monkeypatch.setattr(App, "share_artifacts", lambda app: shared.append(app))
    assert "only an empty one is rebuilt" in project.ask("registry", "rebuild", code=2).stderr
    assert len(shared) == 1


def test_an_altered_manifest_is_refused_and_nothing_is_made_of_it(project: Project) -> None:
    remove_sqlite(project)
    manifest = project.folder / ".rmvdb" / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"source": "call:models:items"', '"source": "call:models:others"'))
    refused = project.ask("registry", "rebuild", code=1).stderr
    assert "manifest.json was altered" in refused
    manifest.unlink()
    assert "manifest.json is missing; put it back from a backup" in project.ask("registry", "rebuild", code=1).stderr
    assert not (project.folder / ".rmvdb" / "registry.sqlite").exists()


def cosine(record: Record, vector: Any) -> float:
    """Return the cosine of a stored vector and another."""
    assert record.vector is not None
    return float(record.vector @ vector / np.linalg.norm(record.vector) / np.linalg.norm(vector))


def _collections(app: Any) -> Any:
    return [row for row in app.registry.collections(app.registry.gallery("things").id) if row.dropped_at is None]
