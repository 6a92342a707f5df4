"""The registry's schema: up, down and up again on SQLite and PostgreSQL, and what a wrong one says."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

from rmvdb.errors import SchemaOutdated, UnknownName
from rmvdb.registry import schema
from rmvdb.registry.registry import Registry
from rmvdb.registry.tables import Table
from tests.support.postgres import PASSWORD

ROOT = Path(__file__).parents[2]


def tables(url: str) -> set[str]:
    """Return the names of the tables that a database has."""
    registry = Registry(url)
    names = set(inspect(registry.engine).get_table_names())
    registry.close()
    return names


def run(url: str, statement: str) -> None:
    """Change the database behind the library's back."""
    registry = Registry(url)
    with registry.engine.begin() as connection:
        connection.execute(text(statement))
    registry.close()


def drift(connection: Connection) -> list[object]:
    """Return the differences between a database and the code's tables."""
    return list(
        compare_metadata(MigrationContext.configure(connection, opts={"version_table": schema.REVISION_TABLE}), Table.metadata)
    )


def test_migrations_make_just_the_tables_of_the_code(database_url: str) -> None:
    schema.upgrade(database_url)
    registry = Registry(database_url)
    with registry.engine.connect() as connection:
        differences = drift(connection)
    registry.close()

    assert differences == []


def test_the_schema_goes_up_down_and_up_again(database_url: str) -> None:
    schema.upgrade(database_url)
    made = tables(database_url)
    schema.downgrade(database_url, "base")
    left = tables(database_url)
    at = schema.current(database_url)
    schema.upgrade(database_url)

    assert made == {*Table.metadata.tables, schema.REVISION_TABLE}
    assert left == {schema.REVISION_TABLE}
    assert at is None
    assert tables(database_url) == made
    assert schema.current(database_url) == schema.head()


def test_a_registry_with_an_upgrade_in_it_can_be_taken_down(database_url: str) -> None:
    schema.upgrade(database_url)
    run(
        database_url,
        "INSERT INTO model_versions (name, embedder, options, dim, metric, base, created_at) "
        "VALUES ('v1', 'a:b', '{}', 2, 'IP', 'v1', 0)",
    )

    schema.downgrade(database_url, "base")

    assert tables(database_url) == {schema.REVISION_TABLE}


def test_going_up_twice_changes_nothing(registry: Registry, database_url: str) -> None:
    version = registry.add_version(name="v1", embedder="models:old", dim=2, metric="COSINE")

    schema.upgrade(database_url)

    assert [each.id for each in registry.versions()] == [version.id]


def test_going_down_twice_changes_nothing(database_url: str) -> None:
    schema.upgrade(database_url)
    schema.downgrade(database_url, "base")
    schema.downgrade(database_url, "base")

    assert schema.current(database_url) is None


def test_a_database_without_tables_says_how_to_make_them(database_url: str) -> None:
    with pytest.raises(SchemaOutdated, match="has no tables yet; run: rmvdb db upgrade"):
        schema.check(database_url)


def test_a_registry_without_tables_says_how_to_make_them(database_url: str) -> None:
    registry = Registry(database_url)
    with pytest.raises(SchemaOutdated, match="run: rmvdb db upgrade"):
        registry.galleries()
    registry.close()


def test_a_database_that_is_up_to_date_is_fine(database_url: str) -> None:
    schema.upgrade(database_url)
    schema.check(database_url)


def test_a_newer_database_is_left_alone(database_url: str) -> None:
    schema.upgrade(database_url)
    run(database_url, f"UPDATE {schema.REVISION_TABLE} SET version_num = '9999'")

    for step in (schema.check, schema.upgrade, lambda url: schema.downgrade(url, "base")):
        with pytest.raises(SchemaOutdated, match="at revision 9999, which this rmvdb does not know"):
            step(database_url)
    assert schema.current(database_url) == "9999"


def test_an_unknown_revision_is_refused_by_name(database_url: str) -> None:
    with pytest.raises(UnknownName, match=r"No schema revision is called '00001'; did you mean '0001'\?"):
        schema.downgrade(database_url, "00001")


def test_asking_for_the_revision_makes_no_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new' / 'registry.sqlite'}"

    assert schema.current(url) is None
    assert list(tmp_path.iterdir()) == []


def test_no_message_shows_the_password(postgres_url: str) -> None:
    with pytest.raises(SchemaOutdated) as caught:
        schema.check(postgres_url)

    assert PASSWORD not in str(caught.value)
    assert "***" in str(caught.value)


def test_many_processes_may_go_up_at_once(database_url: str) -> None:
    go = "import sys; from rmvdb.registry.schema import upgrade; print('ready', flush=True); sys.stdin.readline(); "
    go += "upgrade(sys.argv[1])"
    start = [sys.executable, "-c", go, database_url]
    pipe = subprocess.PIPE
    together = [subprocess.Popen(start, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(4)]
    ready = [process.stdout.readline() for process in together if process.stdout]
    for process in together:
        assert process.stdin
        process.stdin.write("now\n")
        process.stdin.flush()
    said = [process.communicate()[1] for process in together]

    assert ready == ["ready\n"] * 4
    assert said == [""] * 4
    assert [process.returncode for process in together] == [0] * 4
    schema.check(database_url)


def test_threads_may_take_their_databases_up_at_once(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path / str(number)}.sqlite" for number in range(6)]
    with ThreadPoolExecutor(len(urls)) as pool:
        list(pool.map(schema.upgrade, urls))
    assert {schema.current(url) for url in urls} == {schema.head()}


def test_an_upgrade_of_the_schema_waits_for_another_one(database_url: str) -> None:
    registry = Registry(database_url)
    with ThreadPoolExecutor(1) as pool:
        with registry.engine.begin() as other:
            if other.dialect.name == "postgresql":  # in SQLite a transaction that has begun is the lock
                other.execute(text(f"SELECT pg_advisory_xact_lock({schema.LOCK})"))
            waiting = pool.submit(schema.upgrade, database_url)
            time.sleep(0.5)
            early = waiting.done()
        waiting.result()
    registry.close()

    assert not early
    schema.check(database_url)


def test_a_step_that_fails_half_way_leaves_the_database_as_it_was(database_url: str) -> None:
    registry = Registry(database_url, patience=0.1)
    run(database_url, "CREATE TABLE quarantined (mine INTEGER)")

    with pytest.raises(Exception, match="quarantined"):
        schema.upgrade(database_url)

    assert tables(database_url) == {"quarantined"}
    registry.close()


def test_an_upgrade_of_the_schema_is_reported_in_one_sentence(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        schema.upgrade(database_url)

    assert [record.getMessage() for record in caplog.records] == [
        f"The registry's schema was upgraded from base to {schema.head()}"
    ]


def test_alembic_itself_finds_the_settings_and_no_drift(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.sqlite'}"
    schema.upgrade(url)
    alembic = [sys.executable, "-m", "alembic", "-c", str(ROOT / "pyproject.toml"), "check"]

    checked = subprocess.run(alembic, cwd=ROOT, env={"RMVDB_REGISTRY__URL": url, "PATH": ""}, capture_output=True, text=True)

    assert "No new upgrade operations detected." in checked.stdout, checked.stderr
