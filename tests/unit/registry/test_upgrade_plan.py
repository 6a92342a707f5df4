"""The stored form of an upgrade's plan: a row that a released version wrote is read, and that version reads what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from rmvdb.errors import RegistryError
from rmvdb.registry.codec import leg_from_json, leg_to_json
from rmvdb.registry.upgrade_plan import VERSION, EpochName, UpgradePlan
from rmvdb.types import Blend, Leg, Metric
from tests.support.inprocess import make

NEW = Leg(collection="t_v2", model="v2", metric=Metric.COSINE, embedder="v2", transforms=("ab",), calibration="cd")
OLD = Leg(collection="t_v1", model="v1", metric=Metric.L2, embedder="v2", transforms=("ab", "ef"), write_with="v1")

#: As 0.1 wrote it: a key for each epoch, and no version.
RELEASED: dict[str, Any] = {
    "question": {"method": None, "side": "meta", "sample": 200},
    "prediction": {"verdict": "rises", "scores": [0.1, None]},
    "cost": {"records": 40},
    "trained_on": "0a",
    "switch": 0.3,
    "lift": None,
    "before": [leg_to_json(OLD)],
    "serving": [leg_to_json(NEW), leg_to_json(OLD)],
    "later": [leg_to_json(NEW)],
    "final": [leg_to_json(NEW)],
    "until": 0.5,
    "cutover": False,
}


def test_a_plan_that_a_released_version_wrote_is_read_whole() -> None:
    plan = UpgradePlan.from_json(json.loads(json.dumps(RELEASED)))
    assert plan.version == VERSION
    assert plan.legs(EpochName.SERVING) == (NEW, OLD)
    assert plan.legs(EpochName.BEFORE) == (OLD,)
    assert plan.epochs.keys() == {EpochName.BEFORE, EpochName.SERVING, EpochName.LATER, EpochName.FINAL}
    assert (plan.until, plan.cutover, plan.accept_missing, plan.switch) == (0.5, False, False, 0.3)
    assert (plan.trained_on, plan.lift, plan.fallback_transforms) == ("0a", None, None)
    assert (plan.question["side"], plan.prediction, plan.cost) == ("meta", RELEASED["prediction"], {"records": 40})


def test_a_released_version_finds_every_key_where_it_looks() -> None:
    written = json.loads(json.dumps(UpgradePlan.from_json(RELEASED).to_json()))
    assert written == {name: value for name, value in RELEASED.items() if value is not None} | {
        "version": VERSION,
        "accept_missing": False,
    }
    assert [leg_from_json(leg) for leg in written["serving"]] == [NEW, OLD]


def test_a_leg_without_a_blend_is_stored_as_a_released_version_reads_it() -> None:
    """That version knows no field `blend`."""
    assert "blend" not in leg_to_json(OLD)
    written = UpgradePlan(epochs={EpochName.SERVING: (NEW, OLD)}).to_json()
    assert all("blend" not in leg for leg in written["serving"])


def test_a_blend_is_kept_with_its_leg() -> None:
    both = replace(OLD, blend=Blend(embedder="v1", transforms=("ab",), weight=0.4))
    assert leg_from_json(json.loads(json.dumps(leg_to_json(both)))) == both
    plan = UpgradePlan(epochs={EpochName.SERVING: (NEW, both)})
    assert UpgradePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_whether_a_roll_back_has_transforms_for_a_lost_embedder_is_kept() -> None:
    """An empty list says that the roll back goes through the archive; no list, that the original was kept."""
    assert UpgradePlan.from_json(UpgradePlan(fallback_transforms=()).to_json()).fallback_transforms == ()
    assert "stand_in" not in UpgradePlan().to_json()


def test_a_number_that_json_cannot_write_stays_what_it_is() -> None:
    assert str(UpgradePlan(prediction={"gain": float("nan")}).to_json()["prediction"]["gain"]) == "nan"


def test_a_plan_of_a_later_version_and_a_damaged_one_are_refused_with_a_sentence() -> None:
    with pytest.raises(RegistryError, match=r"of version 2, and this rmvdb reads version 1; update this rmvdb"):
        UpgradePlan.from_json(RELEASED | {"version": 2})
    with pytest.raises(RegistryError, match=r"damaged plan of an upgrade: epochs\.serving\.0\.model: Field required"):
        UpgradePlan.from_json(RELEASED | {"serving": [{"collection": "t_v2"}]})


def test_an_upgrade_that_a_released_version_began_is_gone_on_with(tmp_path: Path) -> None:
    """In the middle of its backfill, its row is as that version left it."""
    gallery = make(tmp_path)
    with gallery.registry.engine.begin() as connection:
        stored = json.loads(connection.execute(text("SELECT plan FROM upgrades")).scalar_one())
        assert stored.pop("version") == VERSION
        del stored["accept_missing"]
        old = {"plan": json.dumps(stored | {"prediction": None, "switch": None, "lift": None})}
        connection.execute(text("UPDATE upgrades SET plan = :plan"), old)
    row = gallery.registry.upgrade(gallery.upgrade.id)
    assert gallery.conductor().advance(row, gallery.worker()).phase == "cut over"
    gallery.expect_moved()
    gallery.registry.close()
