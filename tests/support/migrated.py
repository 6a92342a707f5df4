"""Empty registries, each with an identity and a time of its own. The migrations are tests/integration/test_schema.py's."""

from __future__ import annotations

import atexit
import functools
import shutil
import sqlite3
import tempfile
import time
import uuid
from contextlib import closing
from pathlib import Path

from sqlalchemy import make_url

from rmvdb.registry import schema


def migrate(url: str) -> None:
    """Do what `schema.upgrade` does for a new database. On SQLite this is ten times as fast, and hundreds of tests need it."""
    made = make_url(url)
    if made.get_backend_name() != "sqlite":
        schema.upgrade(url)
        return
    assert made.database
    file = Path(made.database)
    assert not file.exists()
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_template(), file)
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE identity SET name = ?", (uuid.uuid4().hex,))
        connection.execute("UPDATE clock SET time = ?1, shown = ?1", (time.time(),))


@functools.cache
def _template() -> Path:
    """Made once in this process."""
    folder = tempfile.mkdtemp(prefix="rmvdb-registry-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "registry.sqlite"
    schema.upgrade(f"sqlite:///{path}")
    assert not path.with_name("registry.sqlite-wal").exists()  # all of it is in one file
    return path
