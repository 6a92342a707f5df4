"""The package as it is installed: quick to start, small at the door, complete in the wheel, every command explained."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest

import rmvdb
from rmvdb.cli.main import main
from rmvdb.registry.registry import Registry

ROOT = Path(__file__).parents[2]


def commands(group: click.Group, name: str = "rmvdb") -> dict[str, click.Command]:
    """Return every command below a group by what a user types."""
    found: dict[str, click.Command] = {}
    for each, command in group.commands.items():
        typed = f"{name} {each}"
        found |= commands(command, typed) if isinstance(command, click.Group) else {typed: command}
    return found


COMMANDS = commands(main)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Return a Python of its own in the checkout."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)


def test_help_comes_at_once() -> None:
    def seconds() -> float:
        """Of a processor, not of a clock: others may be at work on this machine."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("-m", "rmvdb", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.5


@pytest.mark.parametrize("module", ["rmvdb", "rmvdb.cli.main", "rmvdb.app.config", "rmvdb.errors", "rmvdb.planning.orders.table"])
def test_the_door_opens_without_tensors_engines_or_databases(module: str) -> None:
    heavy = {
        "torch",
        "numpy",
        "faiss",
        "pymilvus",
        "milvus_lite",
        "pandas",
        "pyarrow",
        "sqlalchemy",
        "alembic",
        "apscheduler",
        "PIL",
    }
    loaded = run("-c", f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})").stdout.split()

    assert heavy & set(loaded) == set()


@pytest.mark.parametrize("module", ["rmvdb.registry.registry", "rmvdb.upgrade.status"])
def test_status_needs_no_tensors_and_no_engine(module: str) -> None:
    heavy = {"torch", "faiss", "pymilvus", "milvus_lite", "pandas", "alembic"}
    loaded = run("-c", f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})").stdout.split()

    assert heavy & set(loaded) == set()


@pytest.mark.parametrize("module", ["rmvdb.upgrade.run", "rmvdb.app.daemon", "rmvdb.serving.client"])
def test_a_command_that_trains_nothing_does_not_wait_for_torch(module: str) -> None:
    loaded = run("-c", f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})").stdout.split()

    assert {"torch", "faiss"} & set(loaded) == set()


def test_a_prediction_that_trains_nothing_does_not_wait_for_torch() -> None:
    predict = (
        "import sys, numpy as np; from rmvdb.learning.method import Method, Pairs, TrainingSettings;"
        "from rmvdb.planning.trial import Trial; from rmvdb.planning.prediction import predict;"
        "from rmvdb.types import Metric; old, new = np.random.default_rng(0).normal(size=(2, 300, 8)).astype(np.float32);"
        "trial = Trial(Pairs(old=old, new=new), old_metric=Metric.COSINE, new_metric=Metric.COSINE, settings=TrainingSettings());"
        "print(predict(trial, trial.candidate(Method.NAIVE)).method, 'torch' in sys.modules)"
    )

    assert run("-c", predict).stdout.split() == ["naive", "False"]


def test_the_public_names_are_these() -> None:
    assert sorted(rmvdb.__all__) == [
        "Client",
        "Hit",
        "Record",
        "RmvdbError",
        "TorchEmbedder",
        "connect",
        "errors",
        "read_image",
    ]
    assert all(getattr(rmvdb, name).__doc__ for name in rmvdb.__all__)


def test_a_name_that_is_not_there_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="module 'rmvdb' has no attribute 'serch'"):
        _ = rmvdb.serch


def test_the_version_is_the_same_everywhere() -> None:
    assert f'version = "{rmvdb.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert rmvdb.__version__ in run("-m", "rmvdb", "--version").stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder))
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_holds_every_room_and_every_migration(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("rmvdb-")}
    rooms = {str(path.relative_to(ROOT)) for path in (ROOT / "rmvdb").rglob("*.py")} | {"rmvdb/py.typed"}
    migrations = {
        f"rmvdb/{path.relative_to(ROOT)}" for path in (ROOT / "migrations").rglob("*") if path.suffix in (".py", ".mako")
    }

    assert packed == rooms | migrations


def test_a_registry_is_made_by_what_the_wheel_holds(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    make = (
        "import sys; sys.path.insert(0, sys.argv[1]); from rmvdb.registry import schema; url = 'sqlite:///' + sys.argv[2];"
        "schema.upgrade(url); schema.check(url); print(schema.__file__)"
    )

    where = run("-P", "-c", make, str(tmp_path / "installed"), str(tmp_path / "registry.sqlite")).stdout.strip()

    assert Path(where).parents[1] == tmp_path / "installed" / "rmvdb"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    text = COMMANDS[command].help or ""

    assert text.strip()
    assert "Example:" in text
    assert command in text.split("Example:")[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command: str) -> None:
    options = [each for each in COMMANDS[command].params if isinstance(each, click.Option)]

    assert [each.name for each in options if not each.help] == []


@pytest.mark.parametrize(
    "command",
    [
        "doctor",
        "db check",
        "model list",
        "gallery list",
        "gallery show",
        "simulate",
        "plan",
        "verify",
        "status",
        "history",
        "quarantine list",
        "search",
    ],
)
def test_every_command_that_tells_something_tells_it_to_machines(command: str) -> None:
    assert "--json" in [name for each in COMMANDS[f"rmvdb {command}"].params for name in each.opts]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_row_in_the_table_of_commands(command: str) -> None:
    assert f"\n| `{command}` |" in (ROOT / "docs" / "commands.md").read_text()


def test_the_house_has_thirteen_rooms_and_eight_files_beside_its_doors() -> None:
    """A newcomer sees them all at once. Another room, or another file at the top, needs a better reason than a new subject."""
    there = {path.name.removesuffix(".py"): path.is_dir() for path in (ROOT / "rmvdb").iterdir() if path.name[0] not in "_."}
    assert len([name for name, is_room in there.items() if is_room]) <= 13
    assert {name for name, is_room in there.items() if not is_room and name != "py.typed"} == {
        *("errors", "protocols", "text", "timing", "types"),
        *("aio", "compatible", "metrics"),  # public names of deeper files
    }


def test_a_rooms_first_file_says_what_belongs_there_and_imports_nothing() -> None:
    for room in (path for path in (ROOT / "rmvdb").iterdir() if path.is_dir() and path.name[0] not in "_."):
        says, *imports = ast.parse((room / "__init__.py").read_text()).body
        assert isinstance(says, ast.Expr), room.name
        assert not imports or room.name == "app", room.name  # rmvdb.app.load is a public name


def test_every_module_says_what_it_is() -> None:
    silent = [path.name for path in (ROOT / "rmvdb").rglob("*.py") if not path.read_text().lstrip().startswith('"""')]

    assert silent == []


def test_no_two_rooms_of_the_registry_have_a_method_of_one_name() -> None:
    names = [name for room in Registry.__bases__ for name in vars(room) if not name.startswith("__")]

    assert sorted(names) == sorted(set(names))
