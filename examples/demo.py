"""The main job, end to end, in front of you: a gallery of real pictures changes from model v1 to v2 while it is in use.

python examples/demo.py --out demo                      scikit-learn's digits, about two minutes
python examples/demo.py --out demo --data FOLDER        CIFAR-100, read by FOLDER/load.py, about ten minutes

Every step is the real command, run as a process of its own, while a second process, demo_app.py, keeps searching and writing.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before torch is imported, for this process and those it starts: threads that spin while they wait take the time of the others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich.console import Console

import demo_data
import demo_models
import demo_report
from demo_data import Pictures

HERE = Path(__file__).resolve().parent
#: By this file a folder is known as one that this program made and may empty.
MARK = ".rmvdb-demo"
#: Short waits, so that a minute shows what takes hours on a large gallery.
SETTINGS = {"plan_max_age": 1, "longest_search": 5}
#: Seconds between two looks at the status while the backfill runs, and for which a process may end by itself.
STATUS_EVERY, PATIENCE = 12.0, 20.0

console = Console(highlight=False)


class Commands:
    """Runs `rmvdb …` in the demo's folder and shows what it says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        self.running: list[subprocess.Popen[str]] = []

    def start(self, command: list[str], **more: Any) -> subprocess.Popen[str]:
        """A process in the demo's folder; `end` ends it, however the demo ends."""
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, bufsize=1, **more
        )
        self.running.append(process)
        return process

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `rmvdb …`, with its output shown as it comes."""
        console.print(f"[bold]$ rmvdb {shlex.join(arguments)}[/bold]", soft_wrap=True)
        process = self.start([*_rmvdb(), *arguments], stderr=subprocess.STDOUT)
        threading.Thread(target=self._show, args=(process,), daemon=True).start()
        return process

    def __call__(self, *arguments: str) -> None:
        """Run `rmvdb …` to its end; a failure ends the demo."""
        self.wait(self.begin(*arguments))

    def wait(self, process: subprocess.Popen[str]) -> None:
        """Until a command has ended; a failure ends the demo."""
        if process.wait():
            raise SystemExit(f"{shlex.join(process.args)} ended with exit code {process.returncode}")  # type: ignore[arg-type]
        time.sleep(0.1)  # its last lines

    def end(self) -> None:
        """End what is still running: first by asking, then by force."""
        for process in self.running:
            if process.stdin:
                process.stdin.close()
            elif process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @staticmethod
    def _show(process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            if line.strip():
                console.print(f"  {line.rstrip()}", markup=False, soft_wrap=True)


def _rmvdb() -> list[str]:
    script = Path(sys.executable).with_name("rmvdb")
    return [str(script)] if script.exists() else [sys.executable, "-m", "rmvdb"]


class Application:
    """The second process: demo_app.py."""

    def __init__(self, commands: Commands) -> None:
        console.print("[bold]$ python demo_app.py[/bold]  (the application, a second process, until the end)")
        self._process = commands.start([sys.executable, str(HERE / "demo_app.py")], stdin=subprocess.PIPE)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.rounds: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, command: str, **more: Any) -> dict[str, Any]:
        """Tell it a command and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **more}) + "\n")
        self._process.stdin.flush()
        answer = self._answers.get()
        if answer is None:
            raise SystemExit("the application ended before its time; what it said stands above")
        return answer

    def measure(self, name: str, first: int) -> None:
        """A round now, of the records from id `first` on."""
        _say_round(self.ask("measure", name=name, first=first))

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            try:
                answer = json.loads(line)
            except ValueError:  # a warning of a library
                console.print(line.rstrip(), markup=False)
                continue
            if answer["answer"] == "round":
                self.rounds.append(answer["name"])
                _say_round(answer)
            else:
                self._answers.put(answer)
        self._answers.put(None)


def _say_round(answer: dict[str, Any]) -> None:
    console.print(f"  application: every query ranked what is measured at t = {answer['t']:.2f} ({answer['seconds']:.1f} s)")


class Demo:
    """The steps, in order."""

    def __init__(self, folder: Path, pictures: Pictures, seed: int) -> None:
        self.folder, self.pictures, self.seed = folder, pictures, seed
        #: The lowest id of those that quality is measured on.
        self.first = len(pictures.labelled)
        self.rmvdb = Commands(folder)
        self.seconds: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """All of it; the summary."""
        started = time.monotonic()
        with self.part("train"):
            self.train()
        with self.part("set up"):
            application = self.set_up()
        with self.part("plan"):
            self.plan(application)
        with self.part("deploy"):
            self.deploy(application)
        with self.part("backfill and cut over"):
            self.backfill(application)
        with self.part("clean up"):
            tally = self.clean_up(application)
        with self.part("figures"):
            report = demo_report.Report(self.folder, self.pictures)
            summary = report.summary(tally, ["deployed", *application.rounds], self.seconds)
            self.seconds["total"] = round(time.monotonic() - started, 1)
            demo_report.write(summary, self.folder)
        return summary

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time one part, and say where it begins."""
        console.rule(name, align="left", style="dim")
        started = time.monotonic()
        yield
        self.seconds[name.replace(" ", "_")] = round(time.monotonic() - started, 1)

    def train(self) -> None:
        """v1 on the first half of the classes, v2 on all, apart from each other."""
        demo_data.write(self.pictures, self.folder)
        parts = {name: len(getattr(self.pictures, name)) for name in ("taught", "labelled", "plain", "queries")}
        console.print(f"{self.pictures.name}, in parts that share nothing: {parts}")
        for at, classes in enumerate((self.pictures.classes // 2, self.pictures.classes)):
            part = self.pictures.taught.of_classes(classes)
            shape = demo_models.Shape(
                side=part.images.shape[1],
                channels=1 if part.images.ndim == 3 else 3,
                widths=self.pictures.widths[at],
                dim=self.pictures.dims[at],
                classes=classes,
            )
            epochs = self.pictures.epochs[at]
            net, accuracy = demo_models.train(shape, part.images, part.labels, epochs=epochs, seed=self.seed + at)
            demo_models.save(net, self.folder / f"v{at + 1}.safetensors")
            console.print(
                f"v{at + 1}: {shape.dim} dimensions, {classes} classes, {len(part)} pictures, {epochs} epochs, "
                f"accuracy of the last {100 * accuracy:.0f} %"
            )

    def set_up(self) -> Application:
        """A registry, v1, a gallery, and an application that puts the labelled pictures into it."""
        self.rmvdb("init")
        settings = {**SETTINGS, "batch": self.pictures.batch}
        _set(self.folder / "rmvdb.toml", settings)
        console.print(f"  in rmvdb.toml: {', '.join(f'{key} = {value}' for key, value in settings.items())}")
        self.rmvdb("model", "add", "v1", *_model("v1"), "--classifier", "demo_models:v1_classifier")
        self.rmvdb("gallery", "add", "photos", "--model", "v1", "--source", "folder:photos/{id}.png")
        application = Application(self.rmvdb)
        labels = self.pictures.labelled.labels.tolist()
        held = application.ask("fill", first=0, last=len(labels), labels=labels)["records"]
        console.print(f"  application: client.upsert of the labelled pictures; client.count() = {held}")
        return application

    def plan(self, application: Application) -> None:
        """v2 comes: ψ and ρ are trained on the labelled pictures; then the application adds those to measure on."""
        self.rmvdb("model", "add", "v2", *_model("v2"))
        self.rmvdb("plan", *CHANGE)
        held = application.ask("fill", first=self.first, last=self.first + len(self.pictures.plain))["records"]
        console.print(f"  application: client.upsert of pictures without labels; client.count() = {held}")
        application.ask("traffic")
        console.print("  application: searches and writes from now on")
        application.measure("before", self.first)

    def deploy(self, application: Application) -> None:
        """Both collections are served, nothing is re-embedded yet."""
        self.rmvdb("upgrade", *CHANGE, "--until", "0")
        self.rmvdb("status")
        application.measure("deployed", self.first)

    def backfill(self, application: Application) -> None:
        """The gallery moves, slowed down so that it can be measured on its way; then the old collection leaves service."""
        total = len(self.pictures.labelled) + len(self.pictures.plain)
        self.rmvdb("throttle", "--rate", f"{total / self.pictures.backfill:.0f}")
        application.ask("follow", first=self.first)
        upgrade = self.rmvdb.begin("upgrade", *CHANGE)
        while True:
            try:
                upgrade.wait(STATUS_EVERY)
                break
            except subprocess.TimeoutExpired:
                self.rmvdb("status")
        self.rmvdb.wait(upgrade)
        application.ask("unfollow")
        self.rmvdb("status")
        application.measure("after", self.first)

    def clean_up(self, application: Application) -> dict[str, Any]:
        """The old collection goes; the application has searched and written all the time."""
        self.rmvdb("search", "queries/0.png", "--limit", "3", "--explain")
        self.rmvdb("cleanup", "--yes")
        tally = application.ask("end")
        del tally["answer"]
        return tally


#: The options that change; the same for `plan` and `upgrade`, so that the plan that was made is the one that is used.
CHANGE = ("--from", "v1", "--to", "v2", "--labels", "label")


def _model(name: str) -> tuple[str, ...]:
    return "--embedder", "demo_models:embedder", "--options", json.dumps({"weights": f"{name}.safetensors"})


def _set(file: Path, settings: dict[str, float]) -> None:
    """Take the # away from these settings and give them their value."""
    text = file.read_text(encoding="utf-8")
    for key, value in settings.items():
        text = re.sub(rf"^# {key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
    file.write_text(text, encoding="utf-8")


def _fresh(folder: Path) -> None:
    """An empty folder; one that this program did not make is left as it is."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise SystemExit(f"{folder} is not empty and was not made by this demo; name another folder with --out")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()


def _interrupted(stop: Callable[[], None]) -> int:
    console.print("\ninterrupted; ending what was started")
    stop()
    return 130


def main() -> int:
    """Run the demo; 1 if anything that it promises was not so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder that is made anew (default: %(default)s)")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-100 and its load.py (default: scikit-learn's digits)")
    parser.add_argument("--seed", type=int, default=0, help="of the parts and the models (default: %(default)s)")
    options = parser.parse_args()
    folder = options.out.resolve()
    _fresh(folder)
    pictures = demo_data.cifar100(options.data, options.seed) if options.data else demo_data.digits(options.seed)
    demo = Demo(folder, pictures, options.seed)
    try:
        summary = demo.run()
    except KeyboardInterrupt:
        return _interrupted(demo.rmvdb.end)
    finally:
        demo.rmvdb.end()
    demo_report.table(summary, console)
    console.print(f"{folder / 'summary.json'}, {folder / 'curve.png'}", soft_wrap=True)
    console.print(f"to look around: cd {folder}; export PYTHONPATH={HERE}; {sys.executable} -m rmvdb status", soft_wrap=True)
    broken = demo_report.failures(summary)
    for sentence in broken:
        console.print(f"[bold red]not as promised:[/bold red] {sentence}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
