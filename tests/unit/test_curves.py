"""`make curves`: its arithmetic, its files, what it keeps, and the page that shows its results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.pretrained import files
from tests.bench.curves import memo, report, run
from tests.bench.curves.cases import CASES, Sizes
from tests.bench.curves.jobs import measured
from tests.bench.curves.made_texts import Hashing
from tests.bench.curves.measure import area, largest_fall, quality
from tests.bench.page import marks

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "curves.json"
RELEVANT = np.array([[True, False, True, False], [False] * 4])


class Counting(Hashing):
    """A model that counts the items that it embeds, and embeds queries in another way."""

    def __init__(self) -> None:
        super().__init__("test", 4, 1.0)
        self.items = 0

    def embed(self, items: Sequence[str]) -> np.ndarray:
        self.items += len(items)
        return super().embed(items)

    def embed_queries(self, items: Sequence[str]) -> np.ndarray:
        return self.embed([f"query.{item}" for item in items])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(files.PLACE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("precision@10", 0.2),
        ("mAP", (1 / 2 + 2 / 3) / 2),
        ("nDCG@10", (1 / np.log2(3) + 1 / np.log2(4)) / (1 + 1 / np.log2(3))),
    ],
)
def test_a_ranking_is_worth_what_the_metric_says_and_a_query_without_answers_nothing(metric: str, expected: float) -> None:
    assert quality([[1, 0, 2, 3], [0, 1, 2, 3]], RELEVANT, metric) == pytest.approx(expected)


def test_a_curve_has_an_area_and_a_largest_fall() -> None:
    points = [(0.0, 0.2), (0.5, 0.6), (0.75, 0.5), (1.0, 0.8)]
    assert area(points) == pytest.approx(0.5 * 0.4 + 0.25 * 0.55 + 0.25 * 0.65)
    assert largest_fall(points) == pytest.approx(0.1)


def test_gain_is_the_area_above_v1_as_a_share_of_what_v2_is_above_it() -> None:
    assert report.gain({"area": 0.5, "M_old": 0.4, "M_new": 0.6}) == pytest.approx(0.5)


def test_an_item_is_embedded_once_for_every_process_and_a_query_apart_from_it(place: Path) -> None:
    first, second = Counting(), Counting()
    items = ["a.b.c", "d.e.f", "a.b.c"]
    vectors, queries = memo.Memo("test", first).embed(items), memo.Memo("test", first).embed_queries(items)
    kept = memo.Memo("test", second)
    assert (kept.embed(items) == vectors).all()
    assert (kept.embed_queries(items) == queries).all()
    assert not (vectors == queries).all()
    assert (first.items, second.items) == (4, 0)


def test_a_model_of_other_weights_keeps_vectors_of_its_own(place: Path) -> None:
    counting = Counting()
    memo.Memo("test", Hashing("other", 4, 1.0)).embed(["a.b.c"])
    memo.Memo("test", counting).embed(["a.b.c"])
    assert counting.items == 1


def test_a_picture_in_memory_is_not_kept(place: Path) -> None:
    class Mean:
        def state_dict(self) -> dict[str, np.ndarray]:
            return {}

        def embed(self, items: Sequence[np.ndarray]) -> np.ndarray:
            return np.array([[item.mean()] for item in items], np.float32)

    # As texts both are the same: numpy leaves the middle out.
    pictures = [np.zeros((64, 64)), np.pad(np.ones((8, 8)), 28)]
    assert np.ptp(memo.Memo("test", Mean()).embed(pictures)) > 0


def test_times_include_the_embedding_of_each_item(place: Path) -> None:
    counting = Counting()
    model = memo.Memo("test", counting)
    model.embed(["a.b.c"])
    with memo.live():
        model.embed(["a.b.c"])
    assert counting.items == 2


def test_a_wheel_of_another_digest_is_refused(place: Path) -> None:
    (place / "wheels").mkdir()
    (place / "wheels" / "wordllama-0.4.0.post1-cp311.whl").write_bytes(b"another")
    with pytest.raises(files.Missing, match=r"wordllama-0\.4\.0\.post1-cp311\.whl has the SHA-256 \w+, not 42c2c889"):
        files.folder("words")


def test_a_case_without_its_data_is_skipped_with_the_reason(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("words", "minilm"):
        (place / name).mkdir()
    about, runs = measured("b", 0, place / "nothing", Sizes(), [])
    assert not runs
    assert "make curves DATA=FOLDER" in about["skipped"]
    assert "case b is not measured" in capsys.readouterr().err


def test_a_row_is_the_median_of_its_seeds_and_says_what_failed() -> None:
    about: dict[str, Any] = {"case": "d", "method": "auto", "rescore": None, "log": False, "chosen": "rm", "order": "random"}
    about["about"] = {"verdict": "warn", "rescore": 20}
    about |= dict.fromkeys(report.NUMBERS, 1.0)
    runs = [{**about, "points": [[0.0, value], [1.0, 1.0]], "M_0": value} for value in (0.2, 0.9, 0.4)]
    (row,) = report.rows(runs)
    assert (row["M_0"], row["seeds"], row["never_below_old"], row["warned"]) == (0.4, 3, False, 3)
    assert row["chosen"] == "rm in random order, rescoring 20"
    assert row["curve"] == [[0.0, 0.4], [1.0, 1.0]]
    (failed,) = report.rows([{**about, "error": "rmvdb upgrade ended with 2"}])
    assert failed["error"] == "rmvdb upgrade ended with 2"


def test_the_best_way_that_starts_no_lower_stands_beside_its_aim() -> None:
    def row(gain: float, models: int, rescore: int | None = 0, *, method: str = "ridge", above: bool = True) -> dict[str, Any]:
        row = {"case": "d", "method": method, "rescore": rescore, "log": False, "gain": gain, "extractions": models}
        return row | {"M_0": 0.9, "M_new": 1.0, "never_below_old": above}

    rows = [row(0.8, 1), row(0.9, 1, above=False), row(0.6, 2), row(-0.2, 2, 20), row(2.0, 1, 0, method="auto")]
    rows += [{"case": "d", "method": "rm", "rescore": 0, "log": False, "error": "refused: it would start lower"}]
    line = report._aims_line("d", rows)
    assert line == "| d | 0.80 | **0.60** (aim 0.70) | −0.20 | 0.90 | 2.00 | none |"


def test_a_method_that_rmvdb_refuses_is_a_result_and_any_other_error_a_failure() -> None:
    refusal = "Error: ridge would start below the old model (mAP 2 points below); the method naive would not"
    assert run._told(refusal, "rmvdb upgrade ended with 1") == run.REFUSED + refusal.removeprefix("Error: ")
    assert not run._told("Error: no such model", "rmvdb upgrade ended with 2").startswith(run.REFUSED)


def test_the_pages_tables_are_the_results() -> None:
    page = (ROOT / "docs" / "research" / "curves.md").read_text()
    begin, end = marks("curves")
    shown = page.split(begin)[1].split(end)[0].strip()
    assert shown == report.markdown(json.loads(RESULTS.read_text())).strip()
    assert (ROOT / "docs" / "research" / "curves.png").is_file()


def test_every_case_is_explained_on_the_page() -> None:
    page = (ROOT / "docs" / "research" / "curves.md").read_text()
    assert all(f"\n| {name} | " in page for name in CASES if name != "m")
