"""Projects on a Milvus server and PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import rmvdb
import rmvdb.app
from tests.support.milvus_server import MilvusServer
from tests.support.project import Project

#: The records of the gallery that `make` gives.
IDS = list(range(1, 201))


#: No call is given up on a busy machine, or by a server that has just come back.
LONGER = {"timeout = 3.0": "timeout = 10.0", "longest_call = 3.0": "longest_call = 10.0", "lease = 9.0": "lease = 30.0"}


#: For fifty threads on one machine: nor is any search so long that it is asked again.
PATIENT = LONGER | {"plan_max_age = 0.6": "plan_max_age = 1.0", "longest_search = 1.5": "longest_search = 4.0"}


def make(
    folder: Path,
    server: MilvusServer,
    database: str,
    *,
    ids: Sequence[int | str] = IDS,
    retry_for: float = 30.0,
    changed: Mapping[str, str] = LONGER,
) -> Project:
    """Return a filled gallery on a server and PostgreSQL; `changed`: lines of its settings, and what stands there."""
    project = Project(folder, milvus=server.address, registry=database, retry_for=retry_for)
    settings = folder / "rmvdb.toml"
    text = settings.read_text()
    for before, after in changed.items():
        assert before in text
        text = text.replace(before, after)
    settings.write_text(text)
    return project.prepare(ids)


def clear(project: Project) -> None:
    """Remove the project's collections from its server."""
    app = rmvdb.app.load(project.folder)
    for gallery in app.registry.galleries():
        for row in app.registry.collections(gallery.id):
            app.store.drop(row.name)
    app.close()
