"""The tables in `results`, and the published ones beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples.paper_tables import models, report, scales
from examples.paper_tables.published import AREAS, COMPATIBILITY
from examples.paper_tables.settings import SETTINGS
from examples.paper_tables.tasks import Task
from rmvdb.planning import quality
from tests.support.paper_pictures import made

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[3] / "results"


def test_every_published_row_is_of_a_known_setting_and_gains_agree_with_their_areas() -> None:
    assert set(AREAS) | set(COMPATIBILITY) <= set(SETTINGS)
    for table in AREAS.values():
        old, new = table["old"][0], table["new"][0]
        assert all(abs(100 * quality.gain(area, old=old, new=new) - gain) < 3 for area, _, gain in table.values())


def test_every_published_p_com_follows_from_its_row() -> None:
    for table in COMPATIBILITY.values():
        for space, names in (("", ("l2", "bct", "ract", "advbct", "hoc")), ("-hyperbolic", ("hbct", "hbct-no-entail"))):
            old, alone = table[f"old{space}"], table[f"new{space}"]
            for row in (table[name] for name in names):
                assert quality.p_com(row[1], old=old[0], alone=alone[0]) == pytest.approx(row[3], abs=0.02)


@pytest.mark.parametrize(
    "name", sorted(str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.json") if path.stem not in ("curves", "others"))
)
def test_a_page_can_be_made_again_from_its_table(name: str) -> None:
    table = RESULTS / name
    assert report.markdown(json.loads(table.read_text())) == table.with_suffix(".md").read_text()


#: The SHA-256 of what was learnt, kept and searched for the tables in `results`.
PRINTS = {
    "cifar100-orders": {
        "old": "af1f90af4591ca6ade46b0ac4534e42d4db057fbedc0e14e7d37fdaaf249ed9f",
        "new": "1c1fe7b124c2daa78635fc315a7e6b7388c043a59b03cee66ff6b90305871713",
        "pairs": "17643d5e9c4cf61779a691fbf70ba26850622b94b12f5fdfb395ccd6a743aadd",
        "gallery": "cc07288789b9199ce4ceb9db68ea1cdce02cad7c7927068e55bfdd3271cb9947",
    },
    "omniglot-open-identities": {
        "old": "ffc278ba95f1bf0bf0e0b107861abc47f1288253e12a502109fa218cbd74cb72",
        "new": "71bf57ef80d4a0926ce0906555f43b4a28d4f97fc44d801fc4447a4ff53437aa",
        "pairs": "11f3ac20fb519a19dd99e0dee6f8952f5142bcea4bbfffadcabead0821e099dc",
        "gallery": "0439dd193a4a1a964663fa3982369a76af6f15ed7a07ec0b756a1b10130dca16",
    },
    "cifar100-ext-data": {
        "old": "dab2520c001f227015078cf6a699eed314861c1aa8eeb2e0ed25ce456e77e46f",
        "new": "1c1fe7b124c2daa78635fc315a7e6b7388c043a59b03cee66ff6b90305871713",
        "pairs": "",
        "gallery": "cc07288789b9199ce4ceb9db68ea1cdce02cad7c7927068e55bfdd3271cb9947",
    },
}


@pytest.mark.parametrize("setting", list(PRINTS))
def test_embeddings_have_the_names_that_older_tables_recorded(
    tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {name: made([0] * number) for number, name in enumerate(PRINTS[setting], start=1)}
    prints = {len(part): PRINTS[setting][name] for name, part in parts.items()}
    monkeypatch.setattr(models, "_fingerprint", lambda pictures: "" if pictures is None else prints[len(pictures)])
    workshop = models.Workshop(Task(**parts, shared=True, queries=None, mirrored=True), tmp_path, device=CPU)
    recipes = scales.chosen(CPU, wider=False).recipes().values()
    recorded = set(json.loads((RESULTS / f"{setting}.json").read_text())["embeddings"])
    if setting == "cifar100-ext-data":  # its other models were named by a steepness that they do not have
        recorded = {name for name in recorded if name.startswith(("hbct", "old-hyperbolic", "new-hyperbolic"))}
    assert recorded <= {workshop.name(recipe, part) for recipe in recipes for part in ("pairs", "gallery")}
    assert len(recorded) >= 4
