"""What the application's searches find is re-embedded first, by the real command."""

from __future__ import annotations

import pytest

from rmvdb.app import wiring
from rmvdb.registry.codec import unpack_ids
from tests.support.project import Project

UPGRADE = ("--from", "v1", "--to", "v2", "--method", "naive", "--order", "traffic")


def test_an_upgrade_in_the_order_of_traffic_begins_with_what_searches_found(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = project.models()
    monkeypatch.setenv("RMVDB_SEARCH__TRAFFIC", "0")
    with project.client() as client:
        client.search(models.item(2001))  # is not counted
    monkeypatch.delenv("RMVDB_SEARCH__TRAFFIC")
    done = project.ask("upgrade", *UPGRADE, code=1)
    assert "No search of gallery 'things' has been counted yet" in done.stderr

    with project.client() as client:
        found = [[hit.id for hit in client.search(models.item(id), limit=20)] for id in range(2001, 2011)]
    times = {id: sum(id in hits for hits in found) for hits in found for id in hits}
    told = project.json("simulate", *UPGRADE[:4], "--methods", "naive", "--sample", "300")
    assert {row["order"] for row in told["rows"] if row["name"] == "naive"} == {
        "classification-score",
        "cluster",
        "random",
        "traffic",
    }
    out = project.ask("upgrade", *UPGRADE, "--until", "0.2", "--no-cutover").stdout
    assert "in traffic order" in out
    assert project.json("status")["order"] == "traffic"
    rows = sorted(wiring.load(project.folder).registry.batches(1), key=lambda row: row.priority)
    first = [id for row in rows for id in unpack_ids(row.ids)][: len(times)]
    assert sorted(first) == sorted(times)
    assert [times[id] for id in first] == sorted(times.values(), reverse=True)
