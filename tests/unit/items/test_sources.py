"""Sources give the items they have, leave out those they have not, and never leave their folder."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmvdb.errors import ItemError, SourceError, UsageError
from rmvdb.items import sources, sql
from rmvdb.items.pictures import read_image
from rmvdb.items.queries import read_queries
from rmvdb.types import Id, Record

USER_MODULE = """
from rmvdb.errors import SourceError

def items(ids):
    return {id: f"item {id}" for id in [*ids, "another"] if id != "unknown"}

def none(ids):
    return {id: None for id in ids}

def broken(ids):
    raise ConnectionError("the object store is away")

def wrong(ids):
    return list(ids)

def picky(ids):
    return {id: id if id not in (7, 23) else {}[id] for id in ids}

class Own:
    def load(self, records):
        return {record.id: record.fields["caption"] for record in records}

class Refuses:
    def __init__(self):
        raise OSError("no key")

own = Own()
number = 3
"""


def records(*ids: Id, **fields: Any) -> list[Record]:
    return [Record(id=id, fields=fields) for id in ids]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with photos and with a module of the user's; imports are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    (tmp_path / "photos" / "train").mkdir(parents=True)
    for name in ("1.jpg", "a.jpg", "train/7.jpg", "000042.jpg"):
        (tmp_path / "photos" / name).write_bytes(b"picture")
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (tmp_path / "usermodule.py").write_text(USER_MODULE)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("user"):
            del sys.modules[name]


def test_a_folder_gives_paths_by_id(folder: Path) -> None:
    source = sources.load("folder:photos/{id}.jpg")
    assert source.load(records(1, 2)) == {1: folder / "photos" / "1.jpg"}
    assert source.load(records("a", "train/7", "b")) == {
        "a": folder / "photos" / "a.jpg",
        "train/7": folder / "photos" / "train" / "7.jpg",
    }
    assert source.load([]) == {}


def test_a_file_name_can_hold_fields_and_zeros(folder: Path) -> None:
    source = sources.load("folder:photos/{split}/{id}.jpg")
    assert source.load(records(7, split="train")) == {7: folder / "photos" / "train" / "7.jpg"}
    assert source.load([*records(7), *records(8, split=None), *records(9, split="test")]) == {}
    assert sources.load("folder:photos/{id:06d}.jpg").load(records(42)) == {42: folder / "photos" / "000042.jpg"}
    with pytest.raises(SourceError, match=r"does not fit record 'a': .*; correct the pattern"):
        sources.load("folder:photos/{id:06d}.jpg").load(records("a"))


def test_relative_folders_start_at_the_given_base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert sources.load("folder:photos/{id}.jpg", base=folder).load(records(1)) == {1: folder / "photos" / "1.jpg"}
    assert sources.load(f"folder:{folder}/photos/{{id}}.jpg").load(records(1)) == {1: folder / "photos" / "1.jpg"}
    assert sources.load(f"folder:/{{id}}{folder}/secret.jpg").load(records(1)) == {}


def test_a_folder_in_the_home_of_a_user_that_nobody_knows_is_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"The folder of '~nobody-here/\{id\}\.jpg' cannot be found, because the home"):
        sources.load("folder:~nobody-here/{id}.jpg")


@pytest.mark.parametrize("id", ["../secret", "train/../../secret", "/etc/passwd", "..", "", "a\0b", "x" * 300, "photos/../../x"])
def test_no_id_leads_out_of_the_folder(folder: Path, id: str) -> None:
    for pattern in ("photos/{id}.jpg", "photos/{id}", "photos/{split}/{id}.jpg", "photos/{id}/../../secret.jpg"):
        assert sources.load(f"folder:{pattern}").load(records(id, split="..")) == {}


@given(id=st.text(st.sampled_from("./\\a~\0"), max_size=12), split=st.text(st.sampled_from("./a"), max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_the_fields_hold_the_path_stays_inside(folder: Path, id: str, split: str) -> None:
    for outside in ("a", "a.jpg"):
        (folder / outside).touch()
    for pattern in ("photos/{id}", "photos/{split}/{id}.jpg", "photos/{split}{id}jpg"):
        for path in sources.load(f"folder:{pattern}").load(records(id, split=split)).values():
            assert path.resolve().is_relative_to(folder / "photos")


def test_one_record_that_a_source_fails_for_is_named_and_the_others_have_their_item(folder: Path) -> None:
    """A year that is a text or a list, but the pattern wants a number."""
    (folder / "photos" / "1999").mkdir()
    for id in range(40):
        (folder / "photos" / "1999" / f"{id}.jpg").touch()
    source = sources.load("folder:photos/{year:04d}/{id}.jpg")
    good = [Record(id=id, vector=None, fields={"year": 1999}) for id in range(40)]
    bad = [Record(id=90 + at, vector=None, fields={"year": year}) for at, year in enumerate(["1999", [1999], 19.99, {}, 1e400])]

    found, failed = sources.given(source, [*good[:20], *bad, *good[20:], *records(99)])

    assert list(found) == list(range(40))
    assert list(failed) == [90, 91, 92, 93, 94]
    assert all("does not fit record 9" in why for why in failed.values())
    with pytest.raises(SourceError, match=r"does not fit record 90: .*; correct the pattern"):
        sources.given(source, bad)
    with pytest.raises(SourceError, match="does not fit record 90"):
        sources.given(source, bad[:1], known_good=lambda: bad)
    assert sources.given(source, bad[:1], known_good=lambda: [*bad, *good])[1].keys() == {90}
    assert sources.given(source, bad * 9 + good)[0].keys() == {record.id for record in good}


def test_no_kind_of_file_but_a_regular_one_is_an_item_and_none_is_waited_for(folder: Path) -> None:
    photos = folder / "photos"
    os.mkfifo(photos / "fifo.jpg")
    (photos / "folder.jpg").mkdir()
    (photos / "broken.jpg").symlink_to(photos / "nowhere")
    (photos / "round.jpg").symlink_to(photos / "round.jpg")
    names = ["fifo", "folder", "broken", "round", "1.jpg/x", "x" * 300, "a\0b", "../secret", "\udcff", "\ud800", 1]
    assert sources.given(sources.load("folder:photos/{id}.jpg"), records(*names))[0].keys() == {1}
    with pytest.raises(ItemError, match="is not a regular file"):
        read_image(photos / "fifo.jpg")


def test_an_error_that_one_record_causes_is_that_records_alone(folder: Path) -> None:
    source = sources.load("call:usermodule:picky")
    found, failed = sources.given(source, records(*range(30)))
    assert set(found) == set(range(30)) - {7, 23}
    assert failed == {id: f"'usermodule:picky' fails: KeyError: {id}; fix it and run the step again" for id in (7, 23)}
    with pytest.raises(SourceError, match="KeyError: 7"):
        sources.given(source, records(7, 23))


def test_a_source_that_is_away_is_asked_once(folder: Path) -> None:
    class Away:
        calls = 0

        def load(self, records: Sequence[Record]) -> dict[Any, Any]:
            self.calls += 1
            raise SourceError("away") from ConnectionError("reset")

    source = Away()
    with pytest.raises(SourceError, match="away"):
        sources.given(source, records(*range(30)))
    assert source.calls == 1


def test_one_broken_function_costs_some_calls_and_not_one_for_each_record(folder: Path) -> None:
    class Broken:
        calls = 0

        def load(self, records: Sequence[Record]) -> dict[Any, Any]:
            self.calls += 1
            raise SourceError("broken")

    source = Broken()
    with pytest.raises(SourceError, match="broken"):
        sources.given(source, records(*range(1000)), known_good=lambda: records(1))
    assert source.calls < 40


def test_a_folder_that_is_not_mounted_stops_everything(folder: Path) -> None:
    with pytest.raises(SourceError, match=r"Folder .*elsewhere does not exist; mount it, or correct"):
        sources.load("folder:elsewhere/{id}.jpg").load(records(1))


@pytest.mark.parametrize(
    "pattern",
    [
        "{id:{width}}",
        "{id:{id.__class__}}",
        "photos/1.jpg",
        "photos/{}.jpg",
        "photos/{id",
        "{id.__class__}",
        "{id[0]}",
        "{id!r}",
        "{0}",
        "{{id}}",
        "{{x}}/{id}",
    ],
)
def test_a_pattern_names_plain_fields(pattern: str) -> None:
    with pytest.raises(UsageError, match="is not a pattern of files"):
        sources.load(f"folder:{pattern}")


def test_a_field_of_the_record_is_its_item() -> None:
    found = sources.load("field:caption").load([*records(1, caption="a cat"), *records(2), *records(3, caption=None)])
    assert found == {1: "a cat"}


def test_a_function_gives_items_for_ids(folder: Path) -> None:
    assert sources.load("call:usermodule:items").load(records("a", "unknown")) == {"a": "item a"}
    assert sources.load("call:usermodule:none").load(records("a")) == {}


@pytest.mark.parametrize("name", ["own", "Own"])
def test_a_source_of_ones_own_gets_the_records(folder: Path, name: str) -> None:
    assert sources.load(f"call:usermodule:{name}").load(records(1, caption="x")) == {1: "x"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("broken", r"'usermodule:broken' fails: ConnectionError: the object store is away; fix it and run the step again"),
        ("wrong", r"'usermodule:wrong' gives a list; it must give a mapping of ids to items"),
        ("Refuses", r"'usermodule:Refuses' fails: OSError: no key"),
        ("number", r"'usermodule:number' is a int; name a function\(ids\) or an object with load\(records\)"),
        ("nothing", r"'usermodule:nothing' cannot be loaded: usermodule \(.*usermodule.py\) has no 'nothing'"),
    ],
)
def test_a_function_that_fails_is_named(folder: Path, name: str, problem: str) -> None:
    with pytest.raises(SourceError, match=problem):
        sources.load(f"call:usermodule:{name}").load(records(1))


def test_a_module_that_is_missing_or_broken_is_named(folder: Path) -> None:
    (folder / "userbroken.py").write_text("import no_such_library")
    (folder / "usersyntax.py").write_text("def f(:")
    for spec, problem in [
        ("usermissing:f", "There is no module 'usermissing' in"),
        ("usermodule.sub:f", "There is no module 'usermodule.sub' in|not a package"),
        ("userbroken:f", "Module 'userbroken' fails to load: it needs 'no_such_library', which is not installed; install it"),
        ("usersyntax:f", "Module 'usersyntax' fails to load: SyntaxError"),
    ]:
        with pytest.raises(SourceError, match=problem):
            sources.load(f"call:{spec}")
    with pytest.raises(UsageError, match=r"does not name an object; write package\.module:object"):
        sources.load("call:usermodule.items")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "photos.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE photos (id INTEGER, caption TEXT, picture BLOB)")
        rows = [(n, f"photo {n}", bytes([n % 256])) for n in range(2000)]
        connection.executemany("INSERT INTO photos VALUES (?, ?, ?)", [*rows, (5000, None, None)])
    connection.close()
    return file


def test_a_query_gives_items_for_any_number_of_ids(table: Path) -> None:
    source = sources.load(f"sql:sqlite:///{table}#SELECT id, caption FROM photos WHERE id IN :ids")
    assert source.load(records(*range(1990, 2010), 5000)) == {n: f"photo {n}" for n in range(1990, 2000)}
    assert len(source.load(records(*range(3000)))) == 2000
    assert source.load([]) == {}
    pictures = sources.load(f"sql:sqlite:///{table}#SELECT id, picture, caption FROM photos WHERE id IN :ids")
    assert pictures.load(records(7)) == {7: b"\x07"}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_row_that_cannot_be_read_is_that_records_alone(table: Path) -> None:
    with sqlite3.connect(table) as connection:
        connection.execute("UPDATE photos SET caption = CAST(x'ff41' AS TEXT) WHERE id = 11")
    connection.close()
    source = sources.load(f"sql:sqlite:///{table}#SELECT id, caption FROM photos WHERE id IN :ids")
    found, failed = sources.given(source, records(*range(30)))
    assert (set(found), set(failed)) == (set(range(30)) - {11}, {11})
    assert "Could not decode to UTF-8" in failed[11]


def test_rows_of_other_ids_are_left_out(table: Path) -> None:
    source = sources.load(f"sql:sqlite:///{table}#SELECT id, caption FROM photos WHERE id IN :ids OR id = 1")
    assert source.load(records(2)) == {2: "photo 2"}


def test_an_id_is_never_part_of_the_query(table: Path) -> None:
    source = sources.load(f"sql:sqlite:///{table}#SELECT caption, id FROM photos WHERE caption IN :ids")
    assert source.load(records("photo 1", "x') OR 1=1 --")) == {"photo 1": 1}


def test_a_password_can_come_from_the_environment(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sources.load("sql:sqlite:///${PHOTOS_DB}#SELECT id, caption FROM photos WHERE id IN :ids")
    with pytest.raises(SourceError, match="The environment variable PHOTOS_DB is not set"):
        source.load(records(1))
    monkeypatch.setenv("PHOTOS_DB", str(table))
    assert source.load(records(1)) == {1: "photo 1"}


#: As they are, without escapes for a URL.
PASSWORDS = ("p@ss", "hunter@2:xyz", "abc@def/ghi", "s3cret/top?tail", "half#", "100%25 + ${HOME}", "&a=b@c", "ü")
DB, BY_IDS = "127.0.0.1:1/db", "#SELECT id, item FROM t WHERE id IN :ids"


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("address", [f"user:${{PART}}@{DB}", f"${{BOTH}}@{DB}", f"{DB}?password=${{PART}}"])
def test_a_password_from_the_environment_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch, address: str, password: str) -> None:
    monkeypatch.setenv("PART", password)
    monkeypatch.setenv("BOTH", f"user:{password}")
    source = sources.load(f"sql:postgresql://{address}{BY_IDS}")
    assert isinstance(source, sql.SQLSource)
    url = source._engine().url
    assert (url.password or url.query["password"], url.host, url.port, url.database) == (password, "127.0.0.1", 1, "db")
    with pytest.raises(SourceError, match=r"127\.0\.0\.1:1/db.* does not answer"):
        source.load(records(1))


def test_a_whole_parameter_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL", "sslmode=require&connect_timeout=3")
    source = sources.load(f"sql:postgresql://me@{DB}?${{SSL}}{BY_IDS}")
    assert isinstance(source, sql.SQLSource)
    assert source._engine().url.query == {"sslmode": "require", "connect_timeout": "3"}


@pytest.mark.parametrize("password", ["p@Tail99", "p@Tail99:x", "p@Tail99/x", "p@Tail99?x"])
def test_no_part_of_an_unescaped_password_is_shown(monkeypatch: pytest.MonkeyPatch, password: str) -> None:
    monkeypatch.setenv("WHOLE", f"postgresql://user:{password}@127.0.0.1:1/db")
    for spec in ("${WHOLE}", f"postgresql://user:{password}@127.0.0.1:1/db", f"postgresql://user:{password}@${{HOME}}/db"):
        with pytest.raises(SourceError, match="is not the address of a database; write one such as postgresql://user") as caught:
            sources.load(f"sql:{spec}{BY_IDS}").load(records(1))
        assert "Tail99" not in str(caught.value)
    monkeypatch.setenv("WHOLE", "postgresql://user:p%40Tail99@127.0.0.1:1/db?application_name=a@b")
    with pytest.raises(SourceError, match=r"\$\{WHOLE\} does not answer .*; check the address") as caught:
        sources.load("sql:${WHOLE}" + BY_IDS).load(records(1))
    assert "Tail99" not in str(caught.value)


def test_a_parameter_that_a_database_does_not_take_is_not_repeated(table: Path) -> None:
    with pytest.raises(SourceError, match=r"does not answer .*: ValueError; check the address"):
        sources.load(f"sql:sqlite:///{table}?timeout=Tail99#SELECT id, caption FROM photos WHERE id IN :ids").load(records(1))


def test_a_database_that_does_not_answer_is_named_without_its_password(table: Path) -> None:
    for spec, problem in [
        (f"sqlite:///{table}#SELECT id, missing FROM photos WHERE id IN :ids", "no such column: missing; check the address"),
        (f"sqlite:///{table}#SELECT id FROM photos WHERE id IN :ids", "gives one column; it must give two, id and item"),
        (
            "postgresql://u:s3cret@127.0.0.1:1/x#SELECT id, a FROM t WHERE id IN :ids",
            r"postgresql://u:\*\*\*@127.0.0.1:1/x does not",
        ),
        ("nosuch://u:s3cret@h/x#SELECT id, a FROM t WHERE id IN :ids", r"nosuch://u:\*\*\*@h/x does not answer"),
    ]:
        source = sources.load(f"sql:{spec}")
        with pytest.raises(SourceError, match=problem) as caught:
            source.load(records(1))
        assert "s3cret" not in str(caught.value)
        assert "s3cret" not in repr(source)


@pytest.mark.parametrize(
    "query", ["", "DELETE FROM photos WHERE id IN :ids", "SELECT id, x FROM photos", "SELECT id::ids FROM t"]
)
def test_a_query_selects_by_ids(query: str) -> None:
    with pytest.raises(UsageError, match=r"is not a query for items; write one such as SELECT id, item FROM … WHERE id IN :ids"):
        sources.load(f"sql:sqlite:///x.db#{query}")


@pytest.mark.parametrize("spec", ["", "photos/{id}.jpg", "s3:bucket", "field:", "folder", "https://u:s3cret@h/x"])
def test_a_spec_of_no_kind_names_all_kinds(spec: str) -> None:
    with pytest.raises(UsageError, match=r"is not a source; write folder:.*, field:.*, call:.* or sql:") as caught:
        sources.load(spec)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "where", ["user:p#Tail99@127.0.0.1:1/db", "user:p@#Tail99@127.0.0.1:1/db", "127.0.0.1:1/db?password=p#Tail99"]
)
def test_no_part_of_a_password_with_a_hash_is_shown(where: str) -> None:
    url = f"sql:postgresql://{where}"
    assert "Tail99" not in sources.shown(url)
    assert "Tail99" not in sources.shown(url + BY_IDS)
    with pytest.raises(SourceError) as caught:
        sources.load(url + BY_IDS).load(records(1))
    assert "Tail99" not in str(caught.value)
    for query in ("", "#DELETE FROM photos WHERE id IN :ids", "#SELECT 1"):
        with pytest.raises(UsageError, match="is not a query for items") as refused:
            sources.load(url + query)
        assert "Tail99" not in str(refused.value)


def test_a_line_of_queries_ends_where_json_has_it_end(folder: Path) -> None:
    texts = ["a red\u2028bicycle", "a red\x85bicycle", "a red bicycle"]
    lines = "\r\n".join(json.dumps({"item": text}, ensure_ascii=False) for text in texts)
    (folder / "queries.jsonl").write_bytes(lines.encode("utf-8-sig"))
    assert [query.item for query in read_queries(folder / "queries.jsonl")] == texts


TEXTS = ["a red bicycle", "a red bicycle " * 20, "a red bicycle " * 2000, "nul \0", "\udce9", "", "photos"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_query_that_is_no_file_is_a_text_however_long_it_is(folder: Path, text: str) -> None:
    file = folder / "queries.jsonl"
    file.write_text(json.dumps({"item": text}) + "\n" + json.dumps({"item": "photos/1.jpg"}))
    assert [query.item for query in read_queries(file)] == [text, Path("photos/1.jpg")]


@pytest.mark.parametrize("name", sources.SOURCES)
def test_every_source_is_in_the_error_and_in_the_documentation(name: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "models-and-sources.md").read_text()
    assert f"\n| `{name}:" in page
    with pytest.raises(UsageError, match=f"{name}:"):
        sources.load("nothing:here")


def test_a_lack_of_memory_is_not_a_failure_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked tries smaller parts."""

    def items(ids: object) -> None:
        raise MemoryError

    monkeypatch.setattr("rmvdb.items.callable.load_object", lambda *_, **__: items)
    with pytest.raises(MemoryError):
        sources.load("call:models:items").load(records(1, 2))
