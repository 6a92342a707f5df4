"""A user's project in a folder of its own, driven by the real command line, in real processes or in this one.

Its two models are small numpy functions of a latent vector per record: v2 sees more of it than v1. `faults.json` beside them
makes an embedder misbehave the way real ones do: raise on an item, give NaN, the wrong shape, be slow.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import rmvdb
from rmvdb.app import wiring
from rmvdb.app.wiring import App
from rmvdb.cli import main as cli
from rmvdb.engines import lite
from rmvdb.types import Index

MODELS = """
import json, pathlib, time
import numpy as np

HERE = pathlib.Path(__file__).parent
LATENT, CLASSES = 24, 12
CENTRES = np.random.default_rng(1).normal(size=(CLASSES, LATENT))


def label(id):
    return hash_of(id) % CLASSES


def hash_of(id):
    return sum(str(id).encode()) * 31 + len(str(id))


def latent(id, edition=0):
    seed = [*str(id).encode(), edition]
    return (CENTRES[(label(id) + edition) % CLASSES] + 0.9 * np.random.default_rng(seed).normal(size=LATENT)).astype(np.float32)


def item(id, edition=None):
    return {"id": id, "z": latent(id, editions().get(str(id), 0) if edition is None else edition)}


def editions():
    return _read("editions.json")


def items(ids):
    missing = set(map(str, faults().get("missing", [])))
    return {id: item(id) for id in ids if str(id) not in missing}


def faults():
    return _read("faults.json")


def _read(name):
    try:
        return json.loads((HERE / name).read_text())
    except FileNotFoundError:
        return {}


class Embedder:
    def __init__(self, name, seen, dim):
        self.name, self.seen = name, seen
        self.matrix = np.random.default_rng([*name.encode()]).normal(size=(LATENT, dim)).astype(np.float32)
        self.matrix[seen:] = 0.0

    def state_dict(self):
        return {"matrix": self.matrix}

    def embed(self, items):
        fault = faults().get(self.name, {})
        with (HERE / f"calls-{self.name}.log").open("a") as log:
            log.write("".join(f"{_id(each)}\\n" for each in items))
        time.sleep(fault.get("slow", 0.0) * len(items))
        for each in items:
            if fault.get("raise_all") or str(_id(each)) in fault.get("raise", []):
                raise ValueError(f"cannot decode item {_id(each)}")
        z = np.stack([each["z"] if isinstance(each, dict) else _probe(each) for each in items])
        vectors = np.tanh(z @ self.matrix / 3)
        if fault.get("shape"):
            return vectors[:, : fault["shape"]]
        for row, each in enumerate(items):
            if str(_id(each)) in fault.get("nan", []):
                vectors[row] = np.nan
        return vectors


class Lifted(Embedder):
    def embed(self, items):
        z = super().embed(items) / 2
        length = np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)
        return np.concatenate([np.cosh(length), np.sinh(length) / length * z], axis=1)


def _id(item):
    return item["id"] if isinstance(item, dict) else "probe"


def _probe(item):
    return np.random.default_rng([*str(item)[:40].encode()]).normal(size=LATENT).astype(np.float32)


class Classifier:
    def scores(self, vectors):
        centres = np.tanh(CENTRES @ v1().matrix / 3)
        logits = 5 * vectors @ centres.T
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        return raised / raised.sum(axis=1, keepdims=True)


def v1():
    return Embedder("v1", 8, 16)


def v2():
    return Embedder("v2", 20, 20)


def h1():
    return Lifted("v1", 8, 16)  # hyperbolic, of metric LORENTZ


def h2():
    return Lifted("v2", 20, 20)


def v3():
    return Embedder("v3", 24, 40)


def kin():
    return Embedder("v1", 10, 16)  # trained to be comparable with v1, of which it sees more


def stranger():
    return Embedder("stranger", 24, 16)  # of v1's dimension
"""

CONFIG = """
[milvus]
{milvus}
timeout = 3.0

[registry]
{registry}

[index]
type = "{index}"

[models]
allow = ["models"]

[search]
plan_max_age = 0.6
longest_search = 1.5

[backfill]
batch = {batch}
width = 3
lease = 9.0
longest_call = 3.0
retry_for = {retry_for}
"""


class Project:
    """A folder with rmvdb.toml and models.py, and the commands run in it."""

    #: The project whose `models` this process imports, and their text.
    _at_hand: ClassVar[tuple[Path, str] | None] = None
    #: The processes that the test began.
    started: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(
        self,
        folder: Path,
        *,
        milvus: str | None = None,
        registry: str | None = None,
        batch: int = 50,
        retry_for: float = 15.0,
        index: str = "AUTOINDEX",
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "models.py").write_text(MODELS)
        (folder / "rmvdb.toml").write_text(
            CONFIG.format(
                milvus=f'uri = "{milvus}"' if milvus else "",
                registry=f'url = "{registry}"' if registry else "",
                batch=batch,
                retry_for=retry_for,
                index=index,
            )
        )

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the commands."""
        # One thread each: several processes with a pool for every core would mostly wait for one another.
        threads = {"OMP_NUM_THREADS": "1"}
        # Where this process finds rmvdb its commands must, too.
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        return os.environ | threads | {"PYTHONPATH": path, "PYTHONWARNINGS": "default", "COLUMNS": "200"}

    def command(self, *words: str) -> list[str]:
        """Return the real command, run by this interpreter."""
        return [sys.executable, "-m", "rmvdb", *_accepting(words)]

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Begin a command and do not wait; it does not outlive its test."""
        process = subprocess.Popen(
            self.command(*words),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        self.started.append(process)
        return process

    @classmethod
    def kill_started(cls) -> None:
        """Kill what runs of it still, suspended or not: it may share its database with the next test."""
        while cls.started:
            with cls.started.pop() as process:  # closes its pipes, and waits
                process.kill()

    def run(self, *words: str, code: int | None = 0, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and look at its exit code."""
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"rmvdb {' '.join(words)} took over {timeout} s:\n{out}\n{err}") from None
        return self._expected(subprocess.CompletedProcess(self.command(*words), process.returncode, out, err), code)

    @staticmethod
    def _expected(done: subprocess.CompletedProcess[str], code: int | None) -> subprocess.CompletedProcess[str]:
        """Return the command that ended, if it ended with that code."""
        if code is not None and done.returncode != code:
            words = " ".join(done.args[3:])
            raise AssertionError(f"rmvdb {words} ended with {done.returncode}, not {code}:\n{done.stdout}\n{done.stderr}")
        return done

    def ask(self, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end in this process, where what it says and does hangs on no process: each start costs seconds."""
        out, err = io.StringIO(), io.StringIO()
        with self._inside(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            ended = _exit_code(_accepting(words))
        done = subprocess.CompletedProcess(self.command(*words), ended, out.getvalue(), err.getvalue())
        return self._expected(done, code)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """This process as a command's process would be: in the project's folder, with the models that lie there now."""
        before, stdin = os.environ.get("COLUMNS"), sys.stdin
        os.environ["COLUMNS"], sys.stdin = self.environment["COLUMNS"], io.StringIO()  # nobody answers
        self._forget_models()
        try:
            with contextlib.chdir(self.folder):
                yield
        finally:
            sys.stdin = stdin
            os.environ.pop("COLUMNS")
            if before is not None:
                os.environ["COLUMNS"] = before

    def json(self, *words: str) -> Any:
        """Run a command with --json, and return its output."""
        return json.loads(self.ask(*words, "--json").stdout)

    def fault(self, **faults: Any) -> None:
        """Make the models, or the source, misbehave from now on."""
        self._tell("faults.json", faults)

    def editions(self, **editions: int) -> None:
        """Give these ids another item in the source from now on."""
        self._tell("editions.json", editions)

    def _tell(self, name: str, what: Mapping[str, Any]) -> None:
        """Write the file that the models of every process read at every call, as a whole."""
        half = self.folder / f"{name}.half"
        half.write_text(json.dumps(what))
        half.replace(self.folder / name)

    def calls(self, version: str) -> list[str]:
        """Return the ids that a model has been asked to embed, in order."""
        log = self.folder / f"calls-{version}.log"
        return log.read_text().split() if log.exists() else []

    @contextlib.contextmanager
    def opened(self) -> Iterator[App]:
        """Give the services that every command and application works with, in this process."""
        with contextlib.closing(self.app()) as opened:
            yield opened

    def app(self) -> App:
        """Return the same services, for as long as the test runs."""
        self._forget_models()
        return wiring.load(self.folder)

    def another(self) -> Project:
        """Return another project on the same Milvus Lite file, with a registry of its own."""
        other = Project(self.folder / "other", milvus=str(self.folder / ".rmvdb" / "milvus.db"))
        other.ask("init")
        return other

    def collections(self) -> dict[str, int]:
        """Return the records of each existing collection of the gallery `things`, by model version."""
        return {each["model"]: each["records"] for each in self.json("gallery", "show", "things")["collections"]}

    def copied(self, name: str) -> str:
        """Return a collection that no registry owns yet, with the records of the project's own."""
        held = self.json("gallery", "show")["collections"][0]["name"]
        with self.opened() as opened:
            opened.store.create(replace(opened.store.describe(held), collection=name), Index(type="FLAT"))
            for page in opened.store.scan(held, fields=None, vector=True):
                opened.store.upsert(name, page)
        return name

    def client(self) -> rmvdb.Client:
        """Return the application's client, in this process."""
        self._forget_models()
        return rmvdb.connect(self.folder)

    def models(self) -> Any:
        """Return the project's models module."""
        self._forget_models()
        return importlib.import_module("models")

    def _forget_models(self) -> None:
        """Forget the imported `models`, so that the next import gets this project's present file."""
        folder, wanted = str(self.folder), (self.folder, (self.folder / "models.py").read_text())
        # Only if they are not these already: a thread of a client may be importing them just now.
        if wanted != Project._at_hand:
            sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
            sys.modules.pop("models", None)
            Project._at_hand = wanted

    def stop_engine(self) -> None:
        """End the process that shares this project's Milvus Lite file, as it ends itself when it is idle."""
        lite.release(self.folder / ".rmvdb" / "milvus.db")
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = process.read_bytes().split(b"\0")
            except OSError:
                continue  # it ended while we looked
            if b"rmvdb.engines.lite" in words and any(str(self.folder).encode() + b"/" in word for word in words):
                pid = int(process.parent.name)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                _wait_until_gone(pid)

    def prepare(
        self,
        ids: Sequence[int | str],
        *,
        fill: bool = True,
        old_metric: str = "COSINE",
        new_metric: str = "COSINE",
        processes: bool = False,
    ) -> Project:
        """Registry, both versions, and a gallery `things` filled by v1; with `processes` each command in one of its own."""
        do = self.run if processes else self.ask
        do("init")
        classifier = () if old_metric == "LORENTZ" else ("--classifier", "models:Classifier")
        one, two = ("models:h" if metric == "LORENTZ" else "models:v" for metric in (old_metric, new_metric))
        do("model", "add", "v1", "--embedder", f"{one}1", "--metric", old_metric, *classifier)
        do("model", "add", "v2", "--embedder", f"{two}2", "--metric", new_metric)
        kind = "VARCHAR" if isinstance(ids[0], str) else "INT64"
        do("gallery", "add", "things", "--model", "v1", "--source", "call:models:items", "--id-type", kind)
        if fill:
            models = self.models()
            with self.client() as client:
                client.upsert([{"id": id, "item": models.item(id), "label": models.label(id)} for id in ids])
        return self


def _accepting(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words, with the risk of a named method accepted: a few hundred records hardly show that it starts no lower."""
    named = words and words[0] == "upgrade" and "--method" in words and "--accept-risk" not in words
    return (*words, "--accept-risk") if named else tuple(words)


def _exit_code(words: Sequence[str]) -> int:
    try:
        cli.main(words, prog_name="rmvdb")
    except SystemExit as exc:
        return int(exc.code or 0)
    return 0


def _wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 60
    while _runs(pid):
        assert time.monotonic() < end, f"process {pid} does not end"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Return whether it has not ended; what has ended stays listed, without its words, until its parent looks."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
