"""Every block of README and docs that is not marked runs, in its order, as a reader would run it in an empty folder."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import rmvdb
from rmvdb.cli import main as cli
from rmvdb.engines import lite
from rmvdb.learning.method import Method, TrainingSettings
from tests.docs.blocks import WRITTEN, Block, blocks

#: Pages whose blocks go on from another page's last one, in this order.
AFTER_README, AFTER_START = ["how-to/roll-back.md", "how-to/roll-out-v2.md"], ["coming-from-pymilvus.md"]
#: Pages that go on from the README's gallery before its upgrade.
BEFORE_UPGRADE = [
    "research/compatible-models.md",
    "how-to/keep-real-queries.md",
    "choosing.md",
    "how-to/throttle.md",
    "how-to/rescore.md",
    "how-to/third-version.md",
]
#: Pages that begin in an empty folder.
ALONE = [page for page in WRITTEN if page not in ("README.md", "start.md", *AFTER_README, *AFTER_START, *BEFORE_UPGRADE)]
#: Modules that the pages have their reader write.
YOURS = ("models", "models_v3", "pictures", "points", "e5", "lengths")
#: A word with a digit, and the name of a method: they may be others on another day.
VARIES = re.compile(rf"\S*\d\S*|\b(?:{'|'.join(Method)})\b")


def is_run(block: Block) -> bool:
    return block.printed or (block.reason is None and block.language in ("sh", "python"))


def shape(line: str) -> str:
    return VARIES.sub("#", line.strip())


class Reader:
    """A reader who types a page's blocks in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names, self.lines = folder, {"__name__": "__main__"}, set[str]()

    def read(self, page: str, *, until: str | None = None) -> None:
        """Run the page's blocks, up to the one with the words `until`."""
        for block in filter(is_run, blocks(page)):
            if until and until in block.text:
                return
            self.run(block)

    def run(self, block: Block) -> None:
        first = block.text.partition("\n")[0]
        if block.printed:
            self.look_for(block)
        elif block.language == "sh":
            for command in block.commands:
                self.type(command)
        elif first.startswith("# ") and first.endswith(".py"):
            (self.folder / first.removeprefix("# ")).write_text(block.text)
        elif "MilvusClient" in block.text:  # holds the file until its process ends
            subprocess.run([sys.executable, "-c", block.text], cwd=self.folder, check=True)
        else:
            exec(compile(block.text, str(block), "exec"), self.names)

    def type(self, command: str) -> None:
        """Run a line of a shell in this process."""
        program, *words = shlex.split(command, comments=True)
        assert program == "rmvdb", f"{command}: mark its block as not run, and why"
        done = CliRunner().invoke(cli.main, words)
        assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"
        self.lines |= {shape(line) for line in done.output.splitlines()}

    def look_for(self, block: Block) -> None:
        """Expect that the lines of this block were printed. … at the end of a line stands for its rest."""
        for line in map(shape, block.text.splitlines()):
            start = line.removesuffix("…").rstrip()
            assert any(each == line or (start != line and each.startswith(start)) for each in self.lines), (
                f"{block}: {line}\n" + "\n".join(sorted(self.lines))
            )


@contextlib.contextmanager
def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """Run as a reader in this folder, whose upgrades train and wait less than a user's."""
    others = {name: sys.modules.pop(name) for name in YOURS if name in sys.modules}
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setenv("RMVDB_SEARCH__PLAN_MAX_AGE", "0.3")
        patch.setenv("RMVDB_SEARCH__LONGEST_SEARCH", "1")
        patch.setenv("RMVDB_BACKFILL__WIDTH", "30")
        patch.delenv("RMVDB_CONFIG", raising=False)
        for name in ("epochs", "least_steps"):  # whether a plan is good is asked elsewhere
            patch.setitem(TrainingSettings.__init__.__kwdefaults__, name, 40)
        try:
            yield Reader(folder)
        finally:
            for file in folder.rglob("*.db"):
                lite.release(file)
            for name in YOURS:
                sys.modules.pop(name, None)
            sys.modules.update(others)


def _pictures(folder: Path) -> None:
    """Make the files that the page on files takes for granted."""
    (folder / "photos").mkdir()
    for at in range(1, 41):
        pixels = np.random.default_rng(at).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{at}.jpg")
    Image.open(folder / "photos" / "7.jpg").save(folder / "query.jpg")


def _third_version(folder: Path) -> None:
    """Make the upgrade that the page on a third version takes for granted."""
    (folder / "models_v3.py").write_text("import models\n\n\ndef v3():\n    return models.Sentences(models.Letters(size=4))\n")


def _searched(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make the searches that the page on real queries takes for granted: applications have searched for a while."""
    patch.setenv("RMVDB_SEARCH__KEEP_QUERIES", "2000")
    with rmvdb.connect(folder) as client:
        for at in range(30):
            client.search(f"a lamp that came late, order {at}", limit=1)
    assert len(CliRunner().invoke(cli.main, ["queries", "export"]).output.splitlines()) == 30


@pytest.mark.parametrize("page", [page for page in ALONE if any(map(is_run, blocks(page)))])
def test_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reader(tmp_path, monkeypatch) as user:
        if page == "start-from-files.md":
            _pictures(tmp_path)
        user.read(page)


@pytest.mark.parametrize("pages", [["README.md", *AFTER_README], ["start.md", *AFTER_START]], ids=["README.md", "start.md"])
def test_a_page_runs_and_others_go_on_from_it(pages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reader(tmp_path, monkeypatch) as user:
        for page in pages:
            user.read(page)


def test_pages_that_go_on_from_a_gallery_before_its_upgrade_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reader(tmp_path, monkeypatch) as user:
        user.read("README.md", until="rmvdb upgrade")
        for page in BEFORE_UPGRADE:
            if page == "how-to/keep-real-queries.md":
                _searched(tmp_path, monkeypatch)
            if page == "how-to/throttle.md":
                user.type("rmvdb upgrade --from v1 --to v2 --method naive --execute --until 0.2 --no-cutover")
            if page == "how-to/third-version.md":
                _third_version(tmp_path)
            user.read(page)
        assert "p99_ms" in CliRunner().invoke(cli.main, ["history", "--json"]).output
