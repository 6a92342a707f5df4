"""The short examples, run as a newcomer runs them. The demo has a command of its own, `make demo`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Lines that each example prints, in this order.
PRINTED = {
    "adopt_text_collection": [
        r"8 records, embedded again, match the stored vectors",
        r"Order \d*6\d*: the lamp arrived broken\. Hits of each collection: \{'notes': 40\}",
        r"\$ rmvdb upgrade --from v1 --to v2 --execute --until 0\.5",
        r"120 of 240 records are re-embedded \(t = 0\.50\); both collections are searched",
        r"Order \d+: the lamp arrived broken\. Hits of each collection: (?=.*'notes': \d)(?=.*'notes_v2_\w+': \d).*",
    ],
    "compatible_training": [
        r"old model, digits 0 to 4: +\d\d\.\d mAP in its own gallery",
        r"new model, all digits, plain: +\d\d\.\d mAP in its own gallery, [ 12]?\d\.\d in the old model's",
        r"new model, all digits, ract: +\d\d\.\d mAP in its own gallery, [67]\d\.\d in the old model's",
    ],
    "judged_queries": [
        r"\$ rmvdb plan --from v1 --to v2 --queries judged\.jsonl",
        r"held out \(50 .*old \d\d\.\d\d, new 100\.00 nDCG@10.*",
        r"ok: \w+ starts no lower than the old model, rises, and ends no lower than the new model",
    ],
    "own_embedder_and_source": [
        r"rowing story 42: rowing-\d+, rowing-\d+, rowing-\d+",
        r"\$ rmvdb upgrade --from v1 --to v2",
        r"cut over: 300 records verified, only news_v2_\w+ is searched now",
        r"rowing story 42: rowing-42, .*",
    ],
    "quickstart_files": [
        r"like photos/7\.png: 7\.png \(0\.00\), .*",
        r"cut over: 240 records verified, only photos_v2_\w+ is searched now",
        r"like photos/7\.png: 7\.png \(0\.00\), .*",
        r"photos_v1_\w+ and the archive are gone",
    ],
}


def test_every_example_is_run() -> None:
    names = {file.stem for file in EXAMPLES.glob("*.py")}
    assert {name for name in names if name != "terminal" and not name.startswith("demo")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_happens_and_leaves_nothing_behind(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = tmp_path_factory.mktemp("t")  # a short name: Milvus Lite's socket in it may have 107 characters
    waits = {"RMVDB_SEARCH__PLAN_MAX_AGE": "0.3", "RMVDB_SEARCH__LONGEST_SEARCH": "1", "RMVDB_BACKFILL__WIDTH": "30"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, **waits, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = iter(line.strip() for line in done.stdout.splitlines())
    for expected in PRINTED[name]:
        assert any(re.fullmatch(expected, line) for line in lines), f"{expected}\n{done.stdout}"
    assert list(tmp_path.iterdir()) == []
    assert list(temporary.glob("tmp*")) == []  # torch and Milvus Lite leave folders and logs of other names
