"""The schema of the registry's database: its revision, and how to upgrade or downgrade it.

Alembic is slow to import, so import this module only in the function that uses it.
"""

from __future__ import annotations

import logging
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
from rmvdb.registry.waiting import unhurried
from rmvdb.text import without_password
from rmvdb.timing import ProcessLock

log = logging.getLogger(__name__)

#: Alembic's name for a database without our tables.
BASE = "base"
#: The advisory lock of PostgreSQL for a change of the schema ("rmvdb" as a number).
LOCK = 0x726D766462
#: Alembic has one current migration for the whole process.
_ONE_AT_A_TIME = ProcessLock()


def upgrade(url: str) -> None:
    """Upgrade the database to this code's schema. Does nothing if it has it. Safe while others do the same."""
    with _ONE_AT_A_TIME.now, _Opened(url) as registry:
        _upgrade(registry)


def downgrade(url: str, revision: str) -> None:
    """Downgrade the database to a revision ("base": no tables). The contents of dropped tables are lost."""
    if revision not in _known():
        raise UnknownName("schema revision", revision, _known())
    with _ONE_AT_A_TIME.now, _Opened(url) as registry:
        _downgrade(registry, revision)


def current(url: str) -> str | None:
    """Return the database's revision, None before the first `upgrade`."""
    parsed = parsed_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        return None  # connecting would make an empty file
    with _Opened(url) as registry:
        return _current(registry)


def head() -> str:
    """Return the revision that this code needs."""
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
    before = _locked_revision(registry, s)
    if before != head():
        with unhurried():
            command.upgrade(_config(s), head())
        _say("upgraded", before, head())


@transaction
def _downgrade(registry: Registry, s: Session, /, revision: str) -> None:
    before = _locked_revision(registry, s)
    if _known().index(before) < _known().index(revision):
        raise UsageError(f"The registry is at revision {before}, older than {revision}; run: rmvdb db upgrade")
    if before != revision:
        command.downgrade(_config(s), revision)
        _say("downgraded", before, revision)


def _locked_revision(registry: Registry, s: Session) -> str:
    """Return the revision, and lock it until this transaction ends."""
    if s.get_bind().dialect.name == "postgresql":  # in SQLite, BEGIN IMMEDIATE is the lock
        s.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
    revision = _revision(s) or BASE
    if revision not in _known():
        raise SchemaOutdated(outdated(registry.shown_url, revision))
    return revision


def _revision(s: Session) -> str | None:
    return MigrationContext.configure(s.connection(), opts={"version_table": REVISION_TABLE}).get_current_revision()


def _say(verb: str, before: str, after: str) -> None:
    log.info("The registry's schema was %s from %s to %s", verb, before, after, extra={"action": f"registry.{verb}"})


class _Opened(Registry):
    """A registry for a `with` block. On its connections SQLite may replace a table that other tables refer to."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys=OFF"))

    def _begin(self, s: Session) -> None:
        """Begin a transaction on any schema, without a limit of time."""
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
    # A wheel has them inside the package, a checkout beside it.
    package = Path(__file__).parents[1]
    packed = package / "migrations"
    return packed if packed.is_dir() else package.parent / "migrations"


def _known() -> list[str]:
    """Return this code's revisions from "base" on, oldest first."""
    newest_first = ScriptDirectory.from_config(_config()).walk_revisions()
    return [BASE, *reversed([script.revision for script in newest_first])]


# Alembic logs every step at INFO. One sentence of ours is enough.
logging.getLogger("alembic").setLevel(logging.WARNING)
