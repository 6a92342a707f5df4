"""Which schema the registry's database has, and the ways up and down.

Alembic is slow to import: import this room where it is used.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from rmvdb.errors import SchemaOutdated, UnknownName, UsageError
from rmvdb.registry.engine import parsed_url, unwritable
from rmvdb.registry.registry import Registry
from rmvdb.registry.session import outdated, transaction
from rmvdb.registry.tables import REVISION_TABLE
from rmvdb.text import without_password

log = logging.getLogger(__name__)

#: What a database without any table of ours is at, in Alembic's words.
BASE = "base"
#: Whoever changes the schema of a PostgreSQL database holds this advisory lock ("rmvdb" as a number).
LOCK = 0x726D766462
#: Alembic keeps the migration that it is in for the whole process.
_ONE_AT_A_TIME = threading.Lock()


def upgrade(url: str) -> None:
    """Bring the database to this code's schema; does nothing where it is there. Safe while others do the same."""
    with _ONE_AT_A_TIME, _Opened(url) as registry:
        _upgrade(registry)


def downgrade(url: str, revision: str) -> None:
    """Take the database back to a revision ("base": no tables); what the dropped tables held is lost."""
    if revision not in _known():
        raise UnknownName("schema revision", revision, _known())
    with _ONE_AT_A_TIME, _Opened(url) as registry:
        _downgrade(registry, revision)


def current(url: str) -> str | None:
    """The revision that the database is at; None before the first `upgrade`."""
    parsed = parsed_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        return None  # asking must not make an empty file
    with _Opened(url) as registry:
        return _current(registry)


def head() -> str:
    """The revision that this code needs."""
    return _known()[-1]


def check(url: str) -> None:
    """Check that the database can be written and has exactly this code's schema.

    Raises RegistryError, SchemaOutdated, each with the way out.
    """
    if refusal := unwritable(parsed_url(url)):
        raise refusal
    found = current(url)
    if found != head():
        raise SchemaOutdated(outdated(without_password(url), found))


# --- in one transaction each ------------------------------------------------------------------------------------------


@transaction
def _current(_: Registry, s: Session, /) -> str | None:
    return _revision(s)


@transaction
def _upgrade(registry: Registry, s: Session, /) -> None:
    found = _locked_revision(registry, s)
    if found != head():
        command.upgrade(_config(s), head())
        _say("upgraded", found, head())


@transaction
def _downgrade(registry: Registry, s: Session, /, revision: str) -> None:
    found = _locked_revision(registry, s)
    if _known().index(found) < _known().index(revision):
        raise UsageError(f"The registry is at revision {found}, older than {revision}; run: rmvdb db upgrade")
    if found != revision:
        command.downgrade(_config(s), revision)
        _say("downgraded", found, revision)


def _locked_revision(registry: Registry, s: Session) -> str:
    """The revision, which nobody else changes before this transaction ends."""
    if s.get_bind().dialect.name == "postgresql":  # in SQLite the transaction, which began IMMEDIATE, is the lock
        s.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
    found = _revision(s) or BASE
    if found not in _known():
        raise SchemaOutdated(outdated(registry.shown_url, found))
    return found


def _revision(s: Session) -> str | None:
    return MigrationContext.configure(s.connection(), opts={"version_table": REVISION_TABLE}).get_current_revision()


def _say(verb: str, before: str, after: str) -> None:
    log.info("The registry's schema was %s from %s to %s", verb, before, after, extra={"action": f"registry.{verb}"})


class _Opened(Registry):
    """A registry for the length of a `with`, on whose connections SQLite may make a table again that others refer to."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys=OFF"))

    def _begin(self, s: Session) -> None:
        """What is asked here is asked of any schema, and may take its time."""
        if self.engine.dialect.name == "postgresql":
            s.execute(text("SET LOCAL statement_timeout = 0"))

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- the migrations ---------------------------------------------------------------------------------------------------


def _config(s: Session | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_folder()).replace("%", "%%"))
    config.attributes["connection"] = s.connection() if s else None
    return config


def _folder() -> Path:
    # In a wheel they are packed into the package; in a checkout they are a folder of their own.
    package = Path(__file__).parents[1]
    packed = package / "migrations"
    return packed if packed.is_dir() else package.parent / "migrations"


def _known() -> list[str]:
    """This code's revisions, oldest first, from "base" on."""
    newest_first = ScriptDirectory.from_config(_config()).walk_revisions()
    return [BASE, *reversed([script.revision for script in newest_first])]


# Alembic tells every step at INFO; one sentence of ours is enough.
logging.getLogger("alembic").setLevel(logging.WARNING)
