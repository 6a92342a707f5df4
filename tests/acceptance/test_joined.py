"""A gallery is taken from a lost registry in the middle of an upgrade, and its halves are joined as the documentation says."""

from __future__ import annotations

import contextlib
import shutil
import textwrap
from pathlib import Path

import rmvdb
from tests.docs.blocks import blocks
from tests.support.project import Project

MODELS = """
import numpy as np


class Letters:
    def __init__(self, size):
        self.size = size

    def embed(self, texts):
        rows = np.zeros((len(texts), 64), dtype=np.float32)
        for row, text in zip(rows, texts):
            for at in range(len(text) - self.size + 1):
                row[sum(text[at : at + self.size].encode()) % 64] += 1
        return rows


def v1():
    return Letters(2)


def v2():
    return Letters(3)
"""
TEXTS = {id: f"order {id} of {['lamps', 'chairs', 'tables'][id % 3]}" for id in range(120)}


def test_two_halves_of_an_upgrade_are_told_and_can_be_joined(tmp_path: Path) -> None:
    """Without a word about the other half, a gallery of one collection found half of the records."""
    lost = project_in(tmp_path / "project")
    lost.ask("gallery", "add", "photos", "--model", "v1", "--source", "field:text")
    with lost.client() as client:
        client.upsert({"id": id, "text": text} for id, text in TEXTS.items())
    lost.ask("upgrade", "--from", "v1", "--to", "v2", "--method", "naive", "--order", "random", "--until", "0.5", "--no-cutover")
    engine = lost.folder / ".rmvdb" / "milvus.db"
    with lost.opened() as app:
        halves = {leg.model: leg.collection for leg in app.registry.plan("photos").legs}

    found = project_in(tmp_path / "found", milvus=str(engine))
    told = found.ask("gallery", "take", "photos", "--from-lost-registry", "--yes").stdout
    assert "records lie in 2 collections" in told
    assert all(f"records in {collection}" in told for collection in halves.values())
    assert "rmvdb gallery add" not in told

    for name, model in (("photos", "v2"), ("rest", "v1")):
        found.ask("gallery", "add", name, "--model", model, "--collection", halves[model], "--source", "field:text")
    [script] = [block.text for block in blocks("how-to/recover-a-registry.md") if block.language == "python"]
    with contextlib.chdir(found.folder):
        exec(textwrap.dedent(script), {"rmvdb": rmvdb})
    found.ask("gallery", "remove", "rest", "--yes")
    with found.client() as client:
        assert client.count() == len(TEXTS)
        assert {hit.id for hit in client.search(TEXTS[7], limit=len(TEXTS))} == set(TEXTS)
        assert {record.id: record.fields["text"] for record in client.query(limit=1000)} == TEXTS
    found.stop_engine()
    shutil.rmtree(lost.folder)


def project_in(folder: Path, **options: str) -> Project:
    project = Project(folder, **options)
    (folder / "models.py").write_text(MODELS)
    project.ask("init")
    for version in ("v1", "v2"):
        project.ask("model", "add", version, "--embedder", f"models:{version}")
    return project
