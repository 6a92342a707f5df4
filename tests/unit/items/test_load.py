"""An embedder is found by its spec, and an object that is none is named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rmvdb.errors import ModelError, UsageError
from rmvdb.items.load import load_embedder

REPOSITORY = Path(__file__).parents[3]


USER_MODULE = """
import numpy as np
import torch

class Embedder:
    def __init__(self, scale=1.0, *, dim=2):
        if scale < 0:
            raise ValueError("no negative scale")
        self.scale, self.dim = scale, dim
    def embed(self, items):
        return np.full((len(items), self.dim), self.scale)

def make(scale=2.0):
    return Embedder(scale)

def nothing():
    return None

def function(items):
    return items

def lenient(items=()):
    return list(items)

def choosy(items=None):
    return [len(item) for item in items]

class Holder:
    inner = Embedder(5.0)

ready = Embedder(3.0)
module = torch.nn.Linear(2, 2)
number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    (tmp_path / "usermodels.py").write_text(USER_MODULE)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("usermodels", None)


@pytest.mark.parametrize(
    ("spec", "options", "value"),
    [
        ("usermodels:ready", {}, 3.0),
        ("usermodels:Embedder", {}, 1.0),
        ("usermodels:Embedder", {"scale": 4.0, "dim": 3}, 4.0),
        ("usermodels:make", {}, 2.0),
        ("usermodels:make", {"scale": 7.0}, 7.0),
        ("usermodels:Holder.inner", {}, 5.0),
    ],
)
def test_an_embedder_is_an_object_or_what_makes_one(folder: Path, spec: str, options: dict[str, Any], value: float) -> None:
    assert load_embedder(spec, options).embed(["x"])[0, 0] == value


@pytest.mark.parametrize(
    ("spec", "options", "problem"),
    [
        ("usermodels:missing", {}, r"has no 'missing'; check the name after the colon"),
        ("nomodule:x", {}, r"There is no module 'nomodule' in .*; run from its folder or install it"),
        ("usermodels:Embedder", {"size": 3}, r"cannot be made with options \['size'\]: .*'size'; correct the options"),
        ("usermodels:Embedder", {"scale": -1}, r"fails to load: ValueError: no negative scale"),
        ("usermodels:nothing", {}, r"gives a NoneType without embed\(items\); give it a method"),
        ("usermodels:function", {}, r"cannot be made with options \[\]: missing a required argument"),
        (
            "usermodels:lenient",
            {},
            r"gives a list .*; give it a method .*, add the line `class Embedder: embed = staticmethod\(lenient\)`",
        ),
        ("usermodels:choosy", {}, r"fails to load: TypeError.*, add the line `class Embedder: embed = staticmethod\(choosy\)`"),
        ("usermodels:number", {}, r"gives a int without embed\(items\)"),
        ("usermodels:module", {}, r"gives a Linear without embed\(items\); wrap it: TorchEmbedder\(module, preprocess\)"),
        ("usermodels:ready", {"scale": 3}, r"takes no options; remove scale"),
    ],
)
def test_an_object_that_is_not_an_embedder_is_named(folder: Path, spec: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        load_embedder(spec, options)


@pytest.mark.parametrize("spec", ["", "usermodels", "usermodels:", ":ready", "usermodels.ready", "a b:c", "os:system('x')"])
def test_a_spec_has_a_module_and_a_name(spec: str) -> None:
    with pytest.raises(UsageError, match=r"does not name an object; write package\.module:object"):
        load_embedder(spec)


def test_finding_embedders_and_sources_does_not_load_torch() -> None:
    script = "import sys; from rmvdb.items import kinds, sources; kinds.KINDS['text'].probes(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.strip() == "False"
