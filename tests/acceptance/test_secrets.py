"""Passwords and tokens stay where they were given: no output, log, file, or row of the registry repeats them."""

from __future__ import annotations

import ast
from pathlib import Path

import psycopg
import pytest

import rmvdb
import rmvdb.app
from rmvdb.registry.mark import mark_of
from tests.acceptance.conftest import NAIVE
from tests.support.milvus_server import MilvusServer
from tests.support.postgres import PASSWORD
from tests.support.project import Project

TOKEN = "root:hidden-token"
SECRETS = (PASSWORD, "hidden-token")


@pytest.mark.server
@pytest.mark.postgres
def test_no_output_file_or_row_holds_a_secret(
    tmp_path: Path, milvus_server: MilvusServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMVDB_MILVUS__TOKEN", TOKEN)
    project = Project(tmp_path / "project", milvus=milvus_server.address, registry=postgres_url).prepare(range(60))
    said = [project.run("-v", "doctor"), project.run("-v", *NAIVE), project.run("-v", "status", "--json")]
    monkeypatch.setenv("RMVDB_BACKFILL__RETRY_FOR", "2.0")
    monkeypatch.setenv("RMVDB_MILVUS__URI", "http://127.0.0.1:9")  # no server listens there
    said += [project.run("-v", *words, code=None) for words in (["doctor"], ["gallery", "show"], ["search", "words"])]
    monkeypatch.delenv("RMVDB_MILVUS__URI")
    monkeypatch.setenv("RMVDB_REGISTRY__URL", postgres_url.replace("/test", "/nowhere"))
    said += [project.run("-v", "status", code=1), project.run("-v", "doctor", code=1)]
    monkeypatch.delenv("RMVDB_REGISTRY__URL")
    monkeypatch.delenv("RMVDB_BACKFILL__RETRY_FOR")

    assert not [secret for done in said for secret in SECRETS if secret in done.stdout + done.stderr]
    assert not [path for path in (tmp_path / "project" / ".rmvdb").rglob("*") if path.is_file() and _told(path.read_bytes())]
    assert not _rows_that_tell(postgres_url)

    with project.opened() as opened:
        for row in opened.registry.collections(opened.registry.gallery("things").id):
            mark = str([record.fields for page in opened.store.scan(mark_of(row.name), fields=None) for record in page])
            assert "@" in mark  # it names the registry
            assert not _told(mark.encode())
            opened.store.drop(row.name)


#: Where items come from: as it is refused, and as it is asked for.
TELLING = (
    "sql:postgresql://me:hidden-word@127.0.0.1:1/db",
    "sql:postgresql://me:hidden-word-${PART}@127.0.0.1:1/db",
    "sql:postgresql://me@127.0.0.1:1/db?sslmode=disable&password=hidden-word",
    "sql:postgresql://me@server:hidden-word@127.0.0.1:1/db",
    "sql:mysql://me@127.0.0.1:1/db?passwd=hidden-word",
    "sql:mysql://me@127.0.0.1:1/db?password=abc;hidden-word",
    "sql:mysql://me@127.0.0.1:1/db?password=%3Bhidden-word",
    "sql:mysql://me@127.0.0.1:1/db?password={ab}hidden-word",
    "sql:mysql://me@127.0.0.1:1/db?password=p#hidden-word",
    "sql:trino://me@127.0.0.1:1/db?access_token=hidden-word",
    "sql:mssql+pyodbc://me@/?odbc_connect=SERVER%3Dx%3BUID%3Dme%3BPWD%3D%7Bhidden-word%3B%7D",
    "sql:mssql+pyodbc://me@/?odbc_connect=UID=me; PWD={a}}hidden-word;b};SERVER=x",
    "sql:mssql+pyodbc://me@/?odbc_connect=UID%3Dme%3B%0APWD+%3Dhidden-word",
)
DISCREET = "sql:postgresql://me:${HIDDEN}@127.0.0.1:1/db?secret_name=mine&odbc_connect=UID=me;PWD={${HIDDEN}}"
QUERY = "#SELECT id, photo FROM photos WHERE name <> 'x:y@z' AND id IN :ids"


@pytest.mark.parametrize("url", TELLING)
def test_a_source_with_its_password_in_it_is_refused_and_not_kept(project: Project, url: str) -> None:
    for words in (
        ("add", "others", "--model", "v1", "--source"),
        ("add", "things", "--model", "v1", "--source"),
        ("source", "things"),
    ):
        refused = project.ask("gallery", *words, url + QUERY, code=2)
        assert "put it into the environment and write ${NAME} in its place" in refused.stderr
        assert "hidden-word" not in refused.stdout + refused.stderr
    files = [path for path in (project.folder / ".rmvdb").rglob("*") if path.is_file()]
    assert not [path for path in files if b"hidden-word" in path.read_bytes()]


@pytest.mark.parametrize("url", TELLING)
def test_a_password_that_was_kept_with_a_source_is_not_shown(project: Project, url: str) -> None:
    with project.opened() as opened:
        opened.registry.set_source("things", url + QUERY)
    again = ("gallery", "add", "things", "--model", "v1", "--source", "field:caption")
    said = [project.ask("gallery", "list"), project.ask("gallery", "show"), project.ask("gallery", "list", "--json")]
    said += [project.ask("gallery", "show", "--json"), project.ask("doctor", code=1), project.ask(*again, code=2)]
    assert not [done for done in said if "hidden-word" in done.stdout + done.stderr]
    assert "://me" in said[1].stdout


def test_a_source_whose_password_is_in_the_environment_is_kept_and_shown_as_it_is(project: Project) -> None:
    project.ask("gallery", "add", "others", "--model", "v1", "--source", DISCREET + QUERY)
    assert project.json("gallery", "show", "others")["source"] == DISCREET + QUERY


def test_nothing_that_is_read_back_is_a_pickle() -> None:
    """No room imports a module that unpickles, and no array or weights are loaded in a way that could."""
    for path in Path(rmvdb.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}.intersection(names), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("np", "load"), ("numpy", "load")}, path


def _told(data: bytes) -> bool:
    return any(secret.encode() in data for secret in SECRETS)


def _rows_that_tell(url: str) -> list[str]:
    """Return the tables of the registry, as text, that hold a secret."""
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        texts = {name: str(connection.execute(f'SELECT t::text FROM "{name}" t').fetchall()) for (name,) in tables}
    return [name for name, text in texts.items() if _told(text.encode())]
