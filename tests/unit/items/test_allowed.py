"""Which code may run because a registry names it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmvdb import errors
from rmvdb.items import objects, sources
from rmvdb.items.load import load_classifier, load_embedder
from rmvdb.items.objects import Allowed

MODULE = """
import os
import subprocess
from subprocess import Popen
from userother import Other

class Embedder:
    def __init__(self, scale=1):
        self.scale = scale
    def embed(self, items):
        return [[self.scale]] * len(items)

ready = Embedder(7)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with modules of the user's of which one leaves a trace if it is imported."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    (tmp_path / "userallowed.py").write_text(MODULE)
    (tmp_path / "userother.py").write_text("class Other:\n    def embed(self, items):\n        return items\n")
    (tmp_path / "userevil.py").write_text("import pathlib\npathlib.Path('ran').touch()\ndef embedder():\n    pass\n")
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("user"):
            del sys.modules[name]


ALLOWED = Allowed(modules=("userallowed",), where="/srv/rmvdb.toml")


def test_an_allowed_module_runs(folder: Path) -> None:
    assert load_embedder("userallowed:Embedder", {"scale": 3}, allowed=ALLOWED).embed([1]) == [[3]]
    assert load_embedder("userallowed:ready", allowed=ALLOWED).embed([1]) == [[7]]
    package = Allowed(modules=("concurrent",), where="")
    assert package.has("concurrent.futures")
    assert not package.has("concurrently")


def test_a_module_that_is_not_allowed_is_not_even_imported(folder: Path) -> None:
    saying = r"names code of the module 'userevil', which /srv/rmvdb.toml does not allow; if you trust it, write "
    saying += r'allow = \["userallowed", "userevil"\] there, below \[models\]'
    with pytest.raises(errors.ConfigError, match=saying):
        load_embedder("userevil:embedder", allowed=ALLOWED)
    with pytest.raises(errors.ConfigError, match=saying):
        load_classifier("userevil:embedder", allowed=ALLOWED)
    with pytest.raises(errors.ConfigError, match=saying):
        sources.load("call:userevil:embedder", allowed=ALLOWED)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("name", "module"),
    [("os.system", "os"), ("subprocess.Popen", "subprocess"), ("Popen", "subprocess"), ("Other", "userother"),
     ("Embedder.embed.__class__", "builtins"), ("Popen.communicate", "subprocess")],
)  # fmt: skip
def test_an_allowed_module_is_no_way_to_what_it_imports(folder: Path, name: str, module: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"names code of the module {module!r}"):
        load_embedder(f"userallowed:{name}", {"args": ["touch", "ran"]}, allowed=ALLOWED)
    assert not (folder / "ran").exists()
    assert module in objects.modules_of(f"userallowed:{name}")


def test_nothing_of_rmvdbs_own_runs_because_a_registry_names_it(folder: Path) -> None:
    (folder / "kept").mkdir()
    with pytest.raises(errors.ConfigError, match=r"module 'rmvdb.storage.files'"):
        load_embedder("rmvdb.storage.files:remove", {"path": folder / "kept"}, allowed=ALLOWED)
    assert (folder / "kept").exists()
