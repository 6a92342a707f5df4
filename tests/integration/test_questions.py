"""Questions that no plan can answer are refused before anything is sampled, and one that differs gets a plan of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rmvdb import errors
from rmvdb.learning.method import Method
from rmvdb.planning.question import Question
from rmvdb.types import Index
from rmvdb.upgrade.run import Conductor
from tests.support.inprocess import DIMS, Gallery, make

ASKED = Question(gallery="texts", from_version="v1", to_version="v2")


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    made = make(tmp_path, records=20, deployed=False)
    assert made.conductor().roll_back(made.upgrade) is None
    yield made
    made.registry.close()


def conductor(gallery: Gallery, **services: Any) -> Conductor:
    return Conductor("texts", replace(gallery.conductor().services, **services))


@pytest.mark.parametrize(
    ("asked", "services", "saying"),
    [
        ({"rescore": 20_000}, {}, "--rescore is 20000, but a search gives at most 16384 hits"),
        ({"rescore": 2_000}, {"index": Index(type="GPU_CAGRA")}, "at most 1024 hits"),
        ({"rescore": 20}, {"rescore_ms": 0.0}, "search.rescore_ms is 0, so no search is rescored"),
        ({"rescore": 20, "method": Method.FCT}, {}, "The method fct searches one collection"),
    ],
)
def test_what_no_search_could_rescore_is_refused(
    gallery: Gallery, asked: dict[str, Any], services: dict[str, Any], saying: str
) -> None:
    with pytest.raises(errors.UsageError, match=saying):
        conductor(gallery, **services).resolve(replace(ASKED, **asked))


@pytest.mark.parametrize("rescore", [None, 0, 20])
def test_what_a_search_can_rescore_is_not_refused(gallery: Gallery, rescore: int | None) -> None:
    assert conductor(gallery).resolve(replace(ASKED, rescore=rescore)).rescore == rescore


def test_a_version_with_a_head_is_refused_and_its_base_named(gallery: Gallery) -> None:
    gallery.registry.add_artifact(sha256="12345678", kind="head", suffix="safetensors", size=1)
    gallery.registry.add_version(
        name="v2+12345678", embedder="tests:v2", options={}, classifier=None, dim=DIMS["v2"], metric="COSINE", fingerprint=None,
        probes=None, probe_kind=None, base="v2", head="12345678",
    )  # fmt: skip
    with pytest.raises(errors.UsageError, match="use --to v2"):
        conductor(gallery).resolve(replace(ASKED, to_version="v2+12345678"))


def test_a_plan_no_longer_counts_once_no_search_rescores(gallery: Gallery) -> None:
    asked = [conductor(gallery, rescore_ms=ms).resolve(ASKED).key for ms in (100.0, 60_000.0, 0.0)]
    assert asked[0] == asked[1] != asked[2]
