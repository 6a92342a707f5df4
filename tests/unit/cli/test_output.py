"""Output for people."""

import json
import logging
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rmvdb.cli import main as cli
from rmvdb.cli import output, progress, searching


def test_outside_a_terminal_no_cell_of_a_table_is_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    output.print_rows([{"name": long, "at": "2026-11-22T02:02:02+00:00"}], as_json=False)
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "at"]
    assert row.split() == [long, "2026-11-22T02:02:02+00:00"]


def test_a_cell_reads_as_people_write(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_rows([{"of": ["a", "b"], "mine": True, "is": None, "has": {"label": 3}}], as_json=False)
    assert capsys.readouterr().out.splitlines()[1].split() == ["a,", "b", "yes", "label:", "3"]


@pytest.mark.parametrize(("distance", "shown"), [(-1.2e-7, "0.0"), (0.12345678, "0.123457"), (-2.5, "-2.5")])
def test_a_distance_of_nothing_has_no_sign(distance: float, shown: str) -> None:
    """The cosine of a vector with itself may be a little above 1."""
    assert str(searching._shown(distance)) == shown


def test_an_interrupt_ends_any_command_with_130() -> None:
    @click.group(cls=cli.Commands)
    def main() -> None:
        pass

    @main.command()
    def verify() -> None:
        raise KeyboardInterrupt

    done = CliRunner().invoke(main, ["verify"])
    assert (done.exit_code, done.output) == (130, "Stopped\n")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = tmp_path / "file" / "project" / "rmvdb.toml"
    done = CliRunner().invoke(cli.main, ["--config", str(file), "init"])
    assert done.exit_code == 2
    assert done.output.startswith(f"Error: {file} cannot be written: Not a directory;")


@pytest.mark.parametrize("evil", ["\x1b]0;owned\x07", "\x1b[2J", "a\rb", "\x9b31m", "\u202egpj.exe", "\x00", "\ud800"])
def test_characters_that_a_terminal_would_obey_are_written_out(evil: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.print_rows([{"id": evil, "reasons": [evil], "fields": {evil: evil}}], as_json=False)
    output.echo(f"quarantined {evil}: ψ is fine,\nand so is 東京 🚲", err=True)
    out, err = capsys.readouterr()
    assert not set(evil) & set(out + err) - set("ab]0;owned[2J31mgpj.exe")
    assert ascii(evil)[1:-1] in out
    assert err.endswith("ψ is fine,\nand so is 東京 🚲\n")


EVIL = ("\x1b[2J", "\x9b31m", "\x7f", "\u202egpj.exe", "\ud800", "two\nlines", ":key:", "[red]x[/red]")


@pytest.mark.parametrize("evil", EVIL)
def test_json_holds_nothing_that_a_terminal_would_obey_and_is_read_back_as_it_was(
    evil: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output.print_json([{"id": evil, "東京": "🚲"}])
    out = capsys.readouterr().out
    assert output.shown(out) == out
    assert json.loads(out) == [{"id": evil, "東京": "🚲"}]
    assert "東京" in out


@pytest.mark.parametrize("evil", EVIL)
def test_a_record_is_one_line_of_a_table_and_of_a_log_whatever_its_id(evil: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.print_rows([{"id": evil}], as_json=False)
    out = capsys.readouterr().out
    written = ascii(evil)[1:-1]
    assert [line.strip() for line in out.splitlines()] == ["id", written]
    record = logging.LogRecord("rmvdb", logging.WARNING, __file__, 1, "record %s is quarantined", (evil,), None)
    assert output.Lines("%(levelname)s %(message)s").format(record) == f"WARNING record {written} is quarantined"


def test_a_logged_traceback_keeps_its_lines_and_quotes_nothing_that_a_terminal_would_obey() -> None:
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        record = logging.LogRecord("rmvdb", logging.ERROR, __file__, 1, "it failed", (), sys.exc_info())
    *_, before, last = output.Lines("%(message)s").format(record).splitlines()
    assert "raise ValueError" in before
    assert last == "ValueError: \\x1b[2J"


def test_every_log_of_a_command_is_written_in_such_lines() -> None:
    log = progress.log_to_stdout()
    try:
        assert all(isinstance(handler.formatter, output.Lines) for handler in log.handlers)
    finally:
        log.handlers, log.propagate = [], True
        log.setLevel(logging.NOTSET)


def test_an_error_that_quotes_an_id_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--config", "/nowhere\x1b[2J", "status"])
    assert "/nowhere\\x1b[2J is not there" in capsys.readouterr().err
