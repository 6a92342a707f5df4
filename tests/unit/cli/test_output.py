"""Output for people."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rmvdb import cli
from rmvdb.cli import output, searching


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


def test_an_error_that_quotes_an_id_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--config", "/nowhere\x1b[2J", "status"])
    assert "/nowhere\\x1b[2J is not there" in capsys.readouterr().err
