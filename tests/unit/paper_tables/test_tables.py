"""The papers' tables, from made-up pictures to their files, and what their command refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from examples.paper_tables import __main__ as command
from examples.paper_tables import data, report, scales
from examples.paper_tables.published import COMPATIBILITY
from examples.paper_tables.scales import Scale
from examples.paper_tables.tasks import Sizes
from rmvdb.errors import NeedsConsent
from tests.support.paper_pictures import CLASSES, EACH, READER, written

ORDERS = ("centroid", "cluster", "random")
CPU = torch.device("cpu")


def made_table(setting: str, folder: Path, scale: Scale) -> dict:
    said: list[str] = []
    found = command.make(setting, folder=folder, out=folder / "out", device=CPU, seeds=2, scale=scale, say=said.append)
    return json.loads((folder / "out" / f"{setting}.json").read_text()) | {"said": said, "embeddings": found["embeddings"]}


def test_a_table_from_pictures_to_its_files(folder: Path, tiny: Scale) -> None:
    found = made_table("cifar100-extended-class", folder, tiny)
    methods = [row["method"] for row in found["rows"]]
    lifted = ["fct", "fct-side", "bict"]
    assert methods == ["old", "new", "naive", "rqt", "cl-s", "cl-m", "mcl", "rm", "bct", "ract", *lifted, "mcl, no labels"]
    assert found["setting"] == "cifar100-extended-class"
    assert (found["scale"], found["backbones"], found["epochs"], found["seeds"]) == ("small", ["small"], 1, 2)
    for row in found["rows"]:
        assert {"auc_map", "auc_cmc", "gain", "flips"} <= set(row)
        assert len(row["curve"]) == len(row["flips_curve"]) == 11
    assert [row["seeds"] for row in found["rows"]] == [1, 1, 1, 2, 2, 2, 2, 2, 1, 1, 2, 2, 2, 2]
    assert found["threads"] == [torch.get_num_threads()]
    assert found["weights"] == {"bct": [1, 1], "bict": [1, 0.1], "ract": [1, 1]}
    page = (folder / "out" / "cifar100-extended-class.md").read_text()
    assert "**Small**: a network of four convolutions on a CPU, by" in page
    assert "a width of 512, FCT's of 2,048." in page
    assert "Weights of classification and pull: bct 1, 1; bict 1, 0.1; ract 1, 1." in page
    assert "| 41.4, 60.7 | 78 % |" in page
    assert "absolute values cannot; blank: in no table of the paper, in a figure at most." in page


def test_the_same_command_goes_on_from_kept_embeddings(folder: Path, tiny: Scale) -> None:
    found, again = (made_table("cifar100-orders", folder, tiny) for _ in range(2))
    assert sum("training" in line for line in found["said"]) == 2
    assert not any("training" in line for line in again["said"])
    assert again["rows"] == found["rows"]


def test_altered_embeddings_are_made_again(folder: Path, tiny: Scale) -> None:
    first = made_table("cifar100-ext-data", folder, tiny)
    kept = folder / "out" / "embeddings"
    name = next(name for name in first["embeddings"] if name.startswith("old-gallery"))
    (kept / name).write_bytes((kept / name).read_bytes()[:-4] + b"\0\0\0\0")
    again = made_table("cifar100-ext-data", folder, tiny)
    assert again["embeddings"] == first["embeddings"]
    assert again["rows"] == first["rows"]
    pulls = {"l2": [1, 0.01], "bct": [1, 1], "ract": [1, 1], "advbct": [1, 0.3], "hoc": [1, 0.3]}
    assert again["weights"] == pulls | {"hbct": [1, 0.3], "hbct-no-entail": [1, 0.3]}
    assert {row["method"] for row in first["rows"]} == set(COMPATIBILITY["cifar100-ext-data"])


PARTS = ["temperature 1", "no mining", "no calibration", "1 block", "3 blocks", "9 pairs", "no pull"]
OTHERS = {
    "omniglot-open-identities": ["old", "new", "naive", "rqt", "rm", "mcl, no labels"],
    "cifar100-open-class": ["old", "new", "naive", "rqt", "mcl", "rm", "bct", "ract"],
    "cifar100-ablation": [
        *("old", "new", "naive", "rqt", "cl-s", "cl-s, with ρ"),
        *("rm", *(f"rm: {part}" for part in [*PARTS, "pull 3", "no residual"])),
        *("mcl, no labels", *(f"mcl, no labels: {part}" for part in PARTS)),
        *("rm, no labels", "rm, as printed"),
    ],
    "cifar100-orders": ["old", "new", *(f"rm, {name}" for name in ("classification-score", *ORDERS))],
}


@pytest.mark.parametrize("setting", list(OTHERS))
def test_the_other_tables_of_a_backfill_are_made_too(folder: Path, tiny: Scale, setting: str) -> None:
    found = made_table(setting, folder, replace(tiny, sizes=Sizes(searched=40)))
    assert [row["method"] for row in found["rows"]] == OTHERS[setting]
    for row in found["rows"][2:]:
        assert 0 < row["auc_map"] <= 1
        assert row["seeds"] == (1 if row["method"] in ("naive", "bct", "ract") else 2)
    if setting == "cifar100-ablation":
        alone = {row["method"] for row in found["rows"] if row["regression"] != 1}
        assert alone == {"old", "new", "naive", "rqt", "rm: no pull", "mcl, no labels: no pull", "rm, as printed"}


def market(root: Path) -> None:
    """Twenty people learnt, twelve searched for, each seen by two cameras, and one picture without a person."""
    colours = np.random.default_rng(0).integers(40, 215, (112, 1, 1, 3))
    for person, camera, shot in ((*each, shot) for each in product(range(1, 21), (1, 2)) for shot in range(3)):
        written(root / "bounding_box_train" / f"{person:04}_c{camera}s1_00000{shot}_00.jpg", colours[person])
    for person, camera in product(range(100, 112), (1, 2)):
        for shot in range(2):
            written(root / "bounding_box_test" / f"{person:04}_c{camera}s1_00000{shot}_00.jpg", colours[person])
        written(root / "query" / f"{person:04}_c{camera}s1_000009_00.jpg", colours[person])
    written(root / "bounding_box_test" / "0000_c1s1_000001_00.jpg", colours[0])


def tiny_imagenet(root: Path) -> None:
    """Six classes."""
    colours = np.random.default_rng(0).integers(40, 215, (6, 1, 1, 3))
    lines = []
    for number, shot in product(range(6), range(12)):
        written(root / "train" / f"n{number:02}" / "images" / f"n{number:02}_{shot}.JPEG", colours[number])
        written(root / "val" / "images" / f"val_{number}_{shot}.JPEG", colours[number])
        lines.append(f"val_{number}_{shot}.JPEG\tn{number:02}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("setting", "lay_out", "last"),
    [("market1501-extended-class", market, "mcl, no labels"), ("tinyimagenet-ext-class", tiny_imagenet, "hbct")],
)
def test_tables_of_published_folders_are_made_too(
    tmp_path: Path,
    tiny: Scale,
    setting: str,
    lay_out: Callable[[Path], None],
    last: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data, "MARKET", (32, 16))
    monkeypatch.setattr(data, "TINY", (32, 32))
    lay_out(tmp_path)
    found = made_table(setting, tmp_path, tiny)
    assert [row["method"] for row in found["rows"]][:: len(found["rows"]) - 1] == ["old", last]
    assert (tmp_path / "out" / f"{setting}.md").is_file()


def test_five_updates_make_a_triangle_of_p_com(folder: Path, tiny: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scales.SEQUENCE, "", ("bct",))
    reader = READER.replace(f"np.arange({CLASSES})", "np.arange(10)").replace(f"({CLASSES}, 1, 1, 3)", "(10, 1, 1, 3)")
    (folder / "load.py").write_text(reader.replace(f"{EACH})", "8)"))
    found = made_table("cifar100-five-updates", folder, replace(tiny, backbones=("small", "small-wide")))
    assert [row["method"] for row in found["rows"]] == ["bct", "hbct"]
    for row in found["rows"]:
        assert [len(line) for line in row["p_com"]] == [len(line) for line in row["cross_cmc"]] == [1, 2, 3, 4]
        assert len(row["self_cmc"]) == len(row["alone_cmc"]) == 5
    assert found["backbones"] == ["small", "small-wide"]
    table = (folder / "out" / "cifar100-five-updates.md").read_text()
    assert "| hbct 4 |" in table
    assert "nan" not in table


def test_only_resnets_with_sixty_epochs_and_every_picture_are_full_scale(tiny: Scale) -> None:
    full = scales.chosen(torch.device("cuda"), wider=True)
    assert full.name == "full"
    assert full.backbones == ("resnet18", "resnet50")
    assert replace(full, epochs=59).name == replace(full, sizes=Sizes(taught=10)).name == tiny.name == "small"


SMALL = {"scale": "small", "backbones": ["small"], "device": "CPU"}


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (SMALL | {"scale": "full"}, SMALL),
        (SMALL | {"backbones": ["resnet18"]}, SMALL),
        (SMALL, SMALL | {"device": "NVIDIA H200"}),
    ],
)
def test_a_table_never_takes_the_place_of_a_full_one_or_of_one_by_other_networks_or_another_device(
    tmp_path: Path, there: dict, here: dict
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(there))
    with pytest.raises(NeedsConsent, match=rf"a\.json is of scale {there['scale']}, by .*would be of scale .*another --out"):
        report.write(here | {"setting": "a"}, tmp_path)


def test_that_the_place_is_taken_is_said_before_anything_is_trained(folder: Path, tiny: Scale) -> None:
    out = folder / "out"
    out.mkdir()
    (out / "cifar100-orders.json").write_text(json.dumps(SMALL | {"backbones": ["resnet18"]}))
    with pytest.raises(NeedsConsent, match="by resnet18 on CPU and this table would be of scale small, by small on CPU"):
        made_table("cifar100-orders", folder, tiny)
    assert not (out / "embeddings").exists()


def test_a_page_names_networks_and_device_and_has_no_negative_zero() -> None:
    row = {"method": "old", "seeds": 1, "gain": -1e-9, "spread": {"gain": 0.0}, "curve": [-1e-9] * 11, "curve_cmc": [0.125] * 11}
    row |= dict.fromkeys(("auc_map", "auc_cmc", "fall", "flips"), -1e-9)
    found = SMALL | {"setting": "a", "about": "made up", "pictures": {}, "epochs": 30, "seeds": 1, "seconds": 1.0, "rows": [row]}
    found |= {"backbones": ["resnet18", "resnet50"], "device": "NVIDIA H200", "threads": [1, 2], "weights": {}}
    page = report.markdown(found)
    assert "**Small**: resnet18 and resnet50 on NVIDIA H200, by the same protocol" in page
    assert "in 1 s on NVIDIA H200 by 1 and 2 threads;" in page
    assert "| old | 0.0 | 0.0 | 0 % |  | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 12.5 |" in page
    assert json.dumps(report.rounded([-1e-9])) == "[0.0]"


def test_the_command_names_what_it_cannot_do(folder: Path) -> None:
    runner = CliRunner()
    helped = runner.invoke(command.main, ["--help"])
    assert "Example: python -m examples.paper_tables" in helped.output
    refused = runner.invoke(command.main, ["market1501-extended-class", "--data", str(folder), "--out", str(folder / "out")])
    assert refused.exit_code == 2
    assert "bounding_box_train is not there" in refused.output
    for words in (("--seeds", "2"), ("--pairs", "100")):
        refused = runner.invoke(command.main, ["cifar100-ext-data", "--data", str(folder), *words])
        assert refused.exit_code == 2
        assert "cifar100-ext-data trains no ψ, ρ or h; leave --seeds and --pairs out" in refused.output
    if not torch.cuda.is_available():
        assert "no GPU" in runner.invoke(command.main, ["cifar100-orders", "--data", str(folder), "--device", "cuda"]).output
