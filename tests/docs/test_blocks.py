"""Whatever README and docs show is there: commands, options, settings, names of Python."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from rmvdb.app import config, settings
from rmvdb.cli import main as cli
from tests.docs.blocks import ALL, PAGES, ROOT, WRITTEN, Block, rmvdb_lines, spans

LINES = list(rmvdb_lines())
#: Options of `examples.paper_tables` and `examples/demo.py`, of pip and of pytest.
ELSEWHERE = {"--data", "--device", "--seeds", "--out", "--pairs", "--threads", "--scale", "--pictures", "--group", "--no-deps"}


def of(language: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in ALL if block.language == language]


def parse(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Parse these words as click does before it calls a command. Raise UsageError if it refuses them."""
    with command.make_context(command.name, list(words), parent=parent) as ctx:
        if isinstance(command, click.Group):
            _, found, rest = command.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
            assert found is not None
            parse(found, rest, ctx)


def named(words: list[str]) -> click.Command:
    """Return the command or group that these words begin with."""
    command: click.Command = cli.main
    for word in words:
        if not isinstance(command, click.Group) or word not in command.commands:
            break
        command = command.commands[word]
    return command


def options(command: click.Command) -> set[str]:
    return {name for each in command.params for name in each.opts} | {"--help"}


EVERY_OPTION: set[str] = set()


def _collect(command: click.Command) -> None:
    EVERY_OPTION.update(options(command))
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        _collect(each)


_collect(cli.main)


@pytest.mark.parametrize("block", [pytest.param(each, id=str(each)) for each in ALL])
def test_a_block_has_a_language_that_is_checked(block: Block) -> None:
    assert block.language in {"sh", "python", "toml", "ini", "json", "text"}
    assert block.reason is None or (block.reason.strip() and block.language in {"sh", "python"})
    assert not block.printed or block.language == "text"


def test_every_fence_is_found() -> None:
    for page, text in PAGES.items():
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * sum(block.page == page for block in ALL), page


@pytest.mark.parametrize(("place", "words"), LINES, ids=[place for place, _ in LINES])
def test_every_command_line_is_one_that_rmvdb_takes(place: str, words: list[str]) -> None:
    parse(cli.main, words)


def test_a_command_line_that_rmvdb_does_not_take_is_noticed() -> None:
    for wrong in ("upgrade --from v1", "upgrade --from v1 --to v2 --fast", "gallery ad", "throttle --nice 2"):
        with pytest.raises(click.UsageError):
            parse(cli.main, shlex.split(wrong))


def test_every_script_and_every_target_of_make_in_a_block_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in (each for each in ALL if each.language == "sh"):
        for program, what, *rest in (shlex.split(line, comments=True) for line in block.commands):
            if program == "make":
                assert what in targets, block
            if program == "python":
                path = rest[0].replace(".", "/") if what == "-m" else ""
                scripts = (f"{path}.py", f"{path}/__main__.py") if path else (what,)
                assert any((ROOT / script).exists() for script in scripts), block


@pytest.mark.parametrize("page", WRITTEN)
def test_every_command_in_the_text_is_there(page: str) -> None:
    for span in spans(page):
        if span.startswith("rmvdb ") and "[" not in span:
            words = [word for word in span.split()[1:] if word not in ("…", "FILE")]
            command = named(words)
            assert command is not cli.main or words[0].startswith("-"), span
            own = options(command) | (options(cli.main) if command is cli.main else set())
            assert {word for word in words if re.match(r"--?[a-z]", word)} <= own, span
        elif span.startswith("--"):
            assert set(re.findall(r"--[a-z][\w-]*", span)) <= EVERY_OPTION | ELSEWHERE, span


@pytest.mark.parametrize("block", of("toml"))
def test_every_file_of_settings_is_accepted(block: Block, tmp_path: Path) -> None:
    (tmp_path / "rmvdb.toml").write_text(block.text)
    config.load(tmp_path, trust=True)


@pytest.mark.parametrize("block", of("json"))
def test_every_line_of_json_is_json(block: Block) -> None:
    assert all(json.loads(line) for line in block.text.splitlines())


@pytest.mark.parametrize("page", WRITTEN)
def test_every_setting_in_the_text_is_there(page: str) -> None:
    sections = {
        name: getattr(field.annotation, "model_fields", {}) for name, field in settings.ProjectSettings.model_fields.items()
    }
    for span in spans(page):
        found = re.fullmatch(r"([a-z]+)\.([a-z_0-9]+)", span)
        if found and sections.get(found[1]) and found[2] not in ("db", "sqlite", "py"):  # files
            assert found[2] in sections[found[1]], span


@pytest.mark.parametrize("block", of("python"))
def test_every_name_of_rmvdb_in_python_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rmvdb":
            assert all(_there(f"{node.module}.{each.name}") for each in node.names)
        elif isinstance(node, ast.Import):
            assert all(_there(each.name) for each in node.names if each.name.split(".")[0] == "rmvdb")
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"rmvdb(\.\w+)+", path := ast.unparse(node)):
            assert _there(path), path


@pytest.mark.parametrize("page", WRITTEN)
def test_every_name_of_rmvdb_in_the_text_is_there(page: str) -> None:
    for span in spans(page):
        found = re.match(r"rmvdb(\.[A-Za-z]\w*)+", span)
        if found and not span.startswith("rmvdb.toml"):
            assert _there(found[0]), span


def _there(path: str) -> bool:
    """Return whether a dotted name is a module or an attribute of one."""
    names = path.split(".")
    for size in range(len(names), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:size]))
        except ModuleNotFoundError:
            continue
        for name in names[size:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False
