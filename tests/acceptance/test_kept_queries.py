"""Real queries, from an application's search to a plan: kept only if the settings say so, shown, used and removed."""

from __future__ import annotations

import base64
import json
import logging
import sqlite3
import stat
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from rmvdb.errors import StalePlan
from rmvdb.items.queries import line_of, read_queries
from rmvdb.serving.current_plan import CurrentPlan
from rmvdb.upgrade import plan_step
from tests.support.project import Project


def keep(project: Project, *lines: str) -> None:
    """Let clients keep queries, with more lines in the section [search]."""
    file = project.folder / "rmvdb.toml"
    head, section, rest = file.read_text().partition("[search]\n")
    file.write_text("".join((head, section, *(f"{line}\n" for line in ("keep_queries = 100", *lines)), rest)))


def test_no_query_is_kept_by_default(project: Project) -> None:
    with project.client() as client:
        client.search("red shoes")
        assert not [each.name for each in threading.enumerate() if each.name.startswith("rmvdb-queries")]
    assert project.json("status")["kept_queries"] == 0
    assert "queries:" not in project.ask("status").stdout
    assert project.ask("queries", "export").stdout == ""
    assert "0 kept queries of things removed" in project.ask("queries", "clear").stdout  # there is nothing to ask about


def test_a_connect_that_fails_leaves_no_thread(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """An application tries again and again."""
    keep(project)

    def refuse(*_: object) -> None:
        raise StalePlan("the registry is away")

    monkeypatch.setattr(CurrentPlan, "_ask", refuse)
    with pytest.raises(StalePlan, match="the registry is away"), project.client():
        pass
    assert not [each.name for each in threading.enumerate() if each.name.startswith("rmvdb-queries")]


def test_real_queries_are_shown_given_to_a_plan_and_removed(project: Project, caplog: pytest.LogCaptureFixture) -> None:
    keep(project)
    models = project.models()
    logged = [{"id": id, "z": models.item(id)["z"].tolist()} for id in range(2001, 2031)]
    words = "a secret wish\u202e"
    project.fault(v1={"raise": ["2099"]})
    with caplog.at_level(logging.DEBUG), project.client() as client:
        client.search(logged[0], limit=3)
        client.search(logged[1:])
        client.search(words)
        client.search(b"\x00\xff")
        client.search(vector=[1.0] * 16, model="v1")  # no item, nothing to embed by another model
        client.search(models.item(7))  # its array is none of the values that are kept
        with pytest.raises(Exception, match="2099"):
            client.search({"id": 2099, "z": logged[0]["z"]})  # a query that cannot be embedded is useless
    assert "secret" not in caplog.text
    project.fault()

    now = project.json("status")
    assert (now["kept_queries"], round(now["oldest_query_days"], 1)) == (32, 0)
    assert "queries: 32 kept, the oldest 0.0 days old" in project.ask("status").stdout

    file = project.folder / "kept.jsonl"
    assert f"32 queries of things written to {file}" in project.ask("queries", "export", "--out", str(file)).stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    items = [query.item for query in read_queries(file)]
    assert all(item in items for item in (*logged, words, b"\x00\xff"))
    shown = project.ask("queries", "export", "-g", "things").stdout
    assert shown == file.read_text()
    assert "\u202e" not in shown

    plan = ("plan", "--from", "v1", "--to", "v2", "--method", "procrustes", "--order", "random")
    assert project.json(*plan, "--queries", str(file))["prediction"]["logged"] == 32
    unasked = project.json(*plan)
    assert unasked["prediction"]["logged"] == 32
    assert project.json(*plan)["made_at"] == unasked["made_at"]  # the same queries have the same answer
    with project.opened() as app:
        assert sorted(map(str, items)) == sorted(str(each.item) for each in plan_step.kept_queries(app.conductor("things")))

    assert "Nothing was removed; run the same command with --yes" in project.run("queries", "clear", code=2).stderr
    assert project.json("queries", "clear", "--yes") == {"gallery": "things", "removed": 32}
    assert project.json("status")["kept_queries"] == 0
    assert project.ask("queries", "export").stdout == ""
    assert project.json(*plan)["prediction"]["logged"] == 0


def test_queries_that_are_too_old_are_not_shown_and_gc_removes_them(project: Project) -> None:
    keep(project, "keep_queries_days = 7")
    with project.client() as client:
        client.search("red shoes")
    registry = project.folder / ".rmvdb" / "registry.sqlite"
    with sqlite3.connect(registry) as database:
        database.execute("UPDATE kept_queries SET asked_at = asked_at - 8 * 86400")
    assert project.ask("queries", "export").stdout == ""
    assert "8.0 days old" in project.ask("status").stdout
    assert "registry: 1 kept queries that are too old" in project.ask("gc", "--yes").stdout
    assert project.json("status")["kept_queries"] == 0


def test_no_search_fails_or_waits_while_the_registry_is_locked(project: Project, request: pytest.FixtureRequest) -> None:
    keep(project)
    registry = project.folder / ".rmvdb" / "registry.sqlite"
    with sqlite3.connect(registry) as database:
        database.execute("UPDATE serving_plans SET max_age = 30")  # a client needs no plan meanwhile
    writers: list[threading.Thread] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not statement.startswith("SELECT"):  # nothing that reads waits for the lock
            writers.append(threading.current_thread())

    with project.client() as client:
        client.search("warm")
        database = sqlite3.connect(registry, isolation_level=None)
        database.execute("BEGIN IMMEDIATE")
        event.listen(Engine, "before_cursor_execute", note)
        request.addfinalizer(lambda: event.remove(Engine, "before_cursor_execute", note))
        took = []
        for number in range(400):  # more than half of what a client holds: it tries to write
            began = time.perf_counter()
            client.search(f"locked {number}")
            took.append(time.perf_counter() - began)
        assert "rmvdb-queries-things" in {thread.name for thread in writers}
        assert threading.current_thread() not in writers
        assert max(took) < 1.8  # a statement waits for the lock for two seconds
        database.rollback()
        database.close()
    assert project.json("status")["kept_queries"] == 100
    items = [json.loads(line)["item"] for line in project.ask("queries", "export").stdout.splitlines()]
    assert sum(each.startswith("locked") for each in items) >= 99


@pytest.mark.parametrize("item", ["red shoes", "two\nlines \udce9\u202e", b"\x00\xff", {"id": 7}, ["a", 1]])
def test_a_line_gives_its_item_back(tmp_path: Path, item: object) -> None:
    file = tmp_path / "queries.jsonl"
    file.write_text(f"{line_of(item)}\n")
    assert [query.item for query in read_queries(file)] == [item]


def test_a_path_is_read_back_where_its_file_is(tmp_path: Path) -> None:
    (photo := tmp_path / "1.jpg").write_bytes(b"")
    (file := tmp_path / "queries.jsonl").write_text(line_of(photo))
    assert [query.item for query in read_queries(file)] == [photo]


def test_bytes_that_are_no_base64_are_refused_with_their_line(project: Project) -> None:
    file = project.folder / "bad.jsonl"
    file.write_text(f'{{"bytes": "{base64.b64encode(b"x").decode()}"}}\n{{"bytes": "?"}}\n')
    assert "Line 2 of " in project.ask("plan", "--from", "v1", "--to", "v2", "--queries", str(file), code=2).stderr
