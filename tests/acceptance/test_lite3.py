"""The main job on Milvus Lite 3, which speaks as a server does and keeps its files differently."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.conftest import NAIVE
from tests.support import lite3
from tests.support.application import searching
from tests.support.project import Project

IDS = list(range(1, 301))


@pytest.mark.parametrize("kept", [(), ("--instant-rollback",)], ids=["emptied", "original kept"])
def test_a_gallery_is_upgraded_and_rolled_back(tmp_path: Path, kept: tuple[str, ...]) -> None:
    with lite3.served(tmp_path / "three.db") as address:
        project = Project(tmp_path / "project", milvus=address).prepare(IDS)
        doctor = project.ask("doctor").stdout
        assert f"milvus-lite {lite3.VERSION}" in doctor
        assert "FAIL" not in doctor
        with searching(project, IDS) as watch:
            project.ask(*NAIVE, "--until", "0.5", *kept)
            assert 0.5 <= project.json("status")["t"] < 0.6
            with project.client() as client:
                models = project.models()
                client.upsert([{"id": IDS[0], "item": models.item(IDS[0]), "label": 99}])
            project.ask(*NAIVE, *kept)
            assert project.json("verify")["problems"] == 0
            project.ask("rollback")
            project.ask("cleanup", "--yes")
        assert watch.trouble == []
        assert watch.searches > 5
        with project.client() as client:
            (hit,) = client.search(models.item(IDS[0]), limit=1, output_fields=["label"])
            assert (hit.id, hit.fields["label"]) == (IDS[0], 99)
            assert client.count() == len(IDS)
        (left,) = project.json("gallery", "show")["collections"]
        assert (left["model"], left["records"]) == ("v1", len(IDS))
