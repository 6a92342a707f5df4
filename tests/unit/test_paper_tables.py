"""The papers' tables: readers, splits, arithmetic of rows, and one table from made pictures to its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from examples.paper_tables import __main__ as command
from examples.paper_tables import data, models, report, rows, scales, settings, simclr, tasks
from examples.paper_tables.backbones import Backbone
from examples.paper_tables.backfill import Plan, Upgrade
from examples.paper_tables.data import DataSet, Pictures
from examples.paper_tables.published import AREAS, COMPATIBILITY
from examples.paper_tables.rows import Ground, Legs
from examples.paper_tables.scales import Scale
from examples.paper_tables.settings import SETTINGS
from examples.paper_tables.tasks import Sizes, Task
from rmvdb.errors import ItemError, NeedsConsent, UnknownName, UsageError
from rmvdb.learning.training import Fitted, Method, TrainingSettings
from rmvdb.planning import curve as simulated
from rmvdb.planning import quality
from rmvdb.types import Metric

RESULTS = Path(__file__).parents[2] / "results"
CLASSES, EACH = 6, 40
ORDERS = ("centroid", "cluster", "random")
CPU = torch.device("cpu")
#: A folder's reader of pictures that a small network can tell apart: each class has its own colours.
READER = f"""
import numpy as np

def cifar100(split):
    rng = np.random.default_rng(split == "test")
    labels = np.tile(np.arange({CLASSES}), {EACH})
    colours = np.random.default_rng(7).integers(40, 215, ({CLASSES}, 1, 1, 3))
    images = colours[labels] + rng.integers(-40, 40, (len(labels), 32, 32, 3))
    return images.astype(np.uint8), labels, [str(n) for n in range({CLASSES})]

def omniglot():
    labels = np.repeat(np.arange(16), 6)
    names = [f"alphabet{{n // 4}}/character{{n % 4}}" for n in range(16)]
    ink = np.zeros((96, 105, 105), dtype=bool)
    ink[:, :50] = True
    ink |= np.random.default_rng(0).random((96, 1, 105)) < 0.3
    return ink, labels, np.tile(np.arange(6), 16), np.array(names), np.arange(16) < 12
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "load.py").write_text(READER)
    return tmp_path


@pytest.fixture(scope="module")
def tiny() -> Scale:
    return Scale(backbones=("small", "small"), epochs=1, settings=TrainingSettings(epochs=1, least_steps=2, hidden=8))


def made(labels: list[int], **rest: np.ndarray) -> Pictures:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 3, 32, 32), dtype=np.uint8)
    return Pictures(images=images, labels=np.array(labels), **rest)


def test_cifar100_is_read_through_the_folders_own_reader(folder: Path) -> None:
    found = data.cifar100(folder)
    assert found.train.images.shape == found.gallery.images.shape == (CLASSES * EACH, 3, 32, 32)
    assert found.train.images.dtype == np.uint8
    assert found.queries is None
    assert found.mirrored


def test_omniglots_background_is_trained_on_and_the_rest_searched(folder: Path) -> None:
    found = data.omniglot(folder)
    assert set(found.train.labels) == set(range(12))
    assert set(found.gallery.labels) == {12, 13, 14, 15}
    assert found.train.images.shape == (72, 3, 32, 32)
    assert (found.train.images[:, :, 0] == 255).all()
    assert found.train.images[:, :, -1].mean() < 100
    assert not found.mirrored
    assert len(np.unique(found.families)) == 3


def test_a_folder_without_a_reader_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"load\.py is not there; name a folder"):
        data.cifar100(tmp_path)


def written(path: Path, colour: int | np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.broadcast_to(colour, (20, 10, 3)).astype(np.uint8)).save(path)


def test_market1501_reads_identity_and_camera_from_names_and_leaves_junk_out(tmp_path: Path) -> None:
    for name in ("bounding_box_train/0002_c1s1_000451_03.jpg", "query/0005_c2s1_000001_00.jpg"):
        written(tmp_path / name, 9)
    for name in ("0005_c2s1_000002_01.jpg", "0005_c3s1_000003_01.jpg", "0000_c1s1_000004_01.jpg", "-1_c1s1_000005_01.jpg"):
        written(tmp_path / "bounding_box_test" / name, 9)
    (tmp_path / "query" / "Thumbs.db").write_bytes(b"")
    found = data.market1501(tmp_path)
    assert found.train.images.shape == (1, 3, 128, 64)
    assert found.gallery.labels.tolist() == [0, 5, 5]
    assert found.gallery.cameras.tolist() == [1, 2, 3]
    ground = Ground.of(found.gallery, found.queries, np.zeros(3))
    assert ground.leave_out.tolist() == [[False, True, False]]
    assert ground.relevance.tolist() == [[False, False, True]]


def test_tinyimagenet_reads_classes_from_folders_and_from_its_list(tmp_path: Path) -> None:
    for name in ("n01", "n02"):
        written(tmp_path / "train" / name / "images" / f"{name}_0.JPEG", 200)
    written(tmp_path / "val" / "images" / "val_0.JPEG", 100)
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n")
    found = data.tinyimagenet(tmp_path)
    assert found.train.labels.tolist() == [0, 1]
    assert found.gallery.labels.tolist() == [1]
    assert found.gallery.images.shape == (1, 3, 64, 64)
    assert abs(int(found.gallery.images[0, 0, 0, 0]) - 100) < 3


def test_a_missing_layout_and_a_broken_picture_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="bounding_box_train is not there"):
        data.market1501(tmp_path)
    (tmp_path / "bounding_box_train").mkdir()
    (tmp_path / "bounding_box_train" / "0002_c1s1_000451_03.jpg").write_bytes(b"no picture")
    with pytest.raises(ItemError, match=r"0002_c1s1_000451_03\.jpg cannot be read"):
        data.market1501(tmp_path)


def classes(task: Task) -> tuple[int, ...]:
    return tuple(len(np.unique(part.labels)) for part in task.taught.values())


def test_no_kept_picture_is_learnt_and_the_old_models_classes_come_first() -> None:
    labels = list(range(10)) * 10
    found = DataSet(train=made(labels), gallery=made(labels))
    task = tasks.extended_class(found, Sizes())
    assert classes(task) == (5, 10)
    assert len(task.pairs) == 20
    assert len(task.new) == 80
    learnt = {image.tobytes() for image in task.new.images}
    assert {image.tobytes() for image in task.old.images} < learnt
    assert learnt.isdisjoint(image.tobytes() for image in task.pairs.images)
    assert np.array_equal(np.unique(task.old.labels), np.arange(5))


def test_open_classes_have_nothing_in_common() -> None:
    labels = list(range(10)) * 10
    task = tasks.open_class(DataSet(train=made(labels), gallery=made(labels)), Sizes())
    assert not task.shared
    assert classes(task) == (3, 7)
    assert {image.tobytes() for image in task.old.images}.isdisjoint(image.tobytes() for image in task.new.images)


def test_with_less_data_the_old_model_knows_every_class() -> None:
    labels = list(range(4)) * 50
    task = tasks.extended_data(DataSet(train=made(labels), gallery=made(labels)), Sizes(), kept=0.0)
    assert (len(task.old), len(task.new), len(task.pairs)) == (60, 200, 0)
    assert classes(task) == (4, 4)


def test_open_identities_are_kept_and_searched_whole() -> None:
    found = DataSet(
        train=made([n for n in range(10) for _ in range(4)]), gallery=made([n for n in range(20, 30) for _ in range(4)])
    )
    task = tasks.extended_class(found, Sizes(searched=13))
    assert np.unique(task.pairs.labels, return_counts=True)[1].tolist() == [4, 4]
    assert np.unique(task.gallery.labels, return_counts=True)[1].tolist() == [4, 4, 4]
    assert len(task.new) == 32


def test_each_model_of_a_sequence_learns_what_the_one_before_did_and_more() -> None:
    labels = list(range(10)) * 10
    task = tasks.sequence(DataSet(train=made(labels), gallery=made(labels)), Sizes(), kept=0.0)
    assert classes(task) == (2, 10, 2, 4, 6, 8, 10)
    known = [{image.tobytes() for image in step.images} for step in task.steps]
    assert all(few < many for few, many in pairwise(known))


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "small", "small-wide"])
def test_every_backbone_makes_embeddings_of_bytes(name: str) -> None:
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.inference_mode():
        vectors = Backbone(name, dim=16).eval()(images)
    assert vectors.shape == (2, 16)
    assert vectors.dtype == torch.float32
    assert torch.isfinite(vectors).all()


def test_resnets_have_the_published_number_of_weights() -> None:
    counts = {name: sum(each.numel() for each in Backbone(name, dim=100).parameters()) for name in ("resnet18", "resnet50")}
    assert counts == {"resnet18": 11_220_132, "resnet50": 23_705_252}


def test_an_unknown_backbone_is_refused() -> None:
    with pytest.raises(UnknownName, match="resnet18"):
        Backbone("resnet81", dim=8)


def test_pictures_are_shifted_by_a_few_pixels_and_only_mirrored_where_that_keeps_their_class() -> None:
    torch.manual_seed(0)
    ramp = torch.arange(1, 33, dtype=torch.uint8).expand(64, 3, 32, 32)
    plain, mirrored = (models.shifted(ramp, mirrored=mirrored) for mirrored in (False, True))
    middle = plain[:, 0, 16, 16].int() - 17
    assert middle.abs().max() <= models.SHIFT
    assert len(middle.unique()) > 3
    assert (plain[:, 0, 16, 20] > plain[:, 0, 16, 12]).all()
    falls = (mirrored[:, 0, 16, 20] < mirrored[:, 0, 16, 12]).float().mean()
    assert 0.2 < falls < 0.8


def test_nt_xent_is_the_mean_over_both_views_of_every_picture() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(6, 4, dtype=torch.float64)
    unit = vectors / vectors.norm(dim=1, keepdim=True)
    slow = 0.0
    for i in range(6):
        others = [torch.exp(unit[i] @ unit[k] / 0.5) for k in range(6) if k != i]
        slow -= torch.log(torch.exp(unit[i] @ unit[(i + 3) % 6] / 0.5) / sum(others))
    assert simclr.nt_xent(vectors, temperature=0.5).item() == pytest.approx((slow / 6).item(), abs=1e-6)


def test_views_differ_and_stay_pictures() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    one, other = simclr.view(images, mirrored=True), simclr.view(images, mirrored=True)
    assert one.dtype == torch.uint8
    assert one.shape == images.shape
    assert (one != other).float().mean() > 0.5


@pytest.fixture
def legs() -> tuple[Legs, Ground, np.ndarray]:
    rng = np.random.default_rng(3)
    labels = np.arange(60) % 5
    old, new = (rng.normal(size=(60, 8)).astype(np.float32) + far * np.eye(8, dtype=np.float32)[labels] for far in (1, 3))
    ground = Ground.of(made(labels.tolist()), None, rng.random(60))
    return Legs(old_q=old, old_g=old, new_q=new, new_g=new), ground, labels


def test_a_row_is_what_simulate_measures_in_one_piece(
    legs: tuple[Legs, Ground, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    (both, ground, labels), itself = legs, np.eye(60, dtype=bool)
    monkeypatch.setattr(rows, "AT_ONCE", 7)
    found = rows.measured(both, ground)
    whole = simulated.curve(
        both.old_q,
        both.old_g,
        both.new_q,
        both.new_g,
        labels[:, None] == labels[None, :],
        ground.order,
        old_metric=Metric.COSINE,
        new_metric=Metric.COSINE,
        leave_out=itself,
    )
    assert found.map == whole.map
    row = rows.row("naive", [found], found)
    summary = simulated.summary(whole, old=whole.map[0], new=whole.map[-1])
    assert (row.auc_map, row.auc_cmc, row.gain) == (summary.auc_map, summary.auc_cmc, summary.gain)
    flips = [quality.negative_flips(whole.top1[0], now) for now in whole.top1]
    assert row.flips_curve == pytest.approx(flips)
    assert row.flips == max(flips)
    assert (row.seeds, row.spread["gain"]) == (1, 0.0)


def test_the_models_alone_gain_nothing_and_everything(legs: tuple[Legs, Ground, np.ndarray]) -> None:
    base = rows.measured(legs[0], legs[1])
    old, new = rows.row("old", [base.held(0)], base), rows.row("new", [base.held(-1)], base)
    assert old.gain == pytest.approx(0, abs=1e-12)
    assert new.gain == pytest.approx(1)
    several = rows.row("rm", [base.held(0), base.held(-1)], base)
    assert several.gain == pytest.approx(0.5)
    assert several.spread["gain"] == pytest.approx(np.sqrt(0.5))
    assert several.flips_curve == pytest.approx([(a + b) / 2 for a, b in zip(old.flips_curve, new.flips_curve, strict=True)])


def test_calibration_is_kept_only_where_it_helps_the_other_half(legs: tuple[Legs, Ground, np.ndarray]) -> None:
    both, ground, _ = legs
    same = replace(both, old_q=both.new_q, old_g=both.new_g)
    assert rows.tuned(same, ground)[1] == simulated.UNCALIBRATED
    # Distances of half the size: the old leg takes every first place until it is calibrated.
    shrunk = replace(both, old_q=both.old_q * 0.1, old_g=both.old_g * 0.1, old_metric=Metric.L2, new_metric=Metric.L2)
    worth, scales = rows.tuned(shrunk, ground)
    assert None not in scales
    assert rows.tuned(shrunk, ground, calibrate=False)[1] == simulated.UNCALIBRATED
    assert rows.tuned(shrunk, ground, calibrate=False)[0] < worth


class Shelf:
    """A workshop that has the vectors of every model by its name, the same of every part."""

    def __init__(self, vectors: dict[str, np.ndarray]) -> None:
        self.vectors = vectors

    def embedded(self, recipe: models.Recipe, part: str) -> models.Embedded:
        return models.Embedded(vectors=self.vectors[recipe.name], score=np.arange(60))


def upgraded(labels: np.ndarray, recipes: dict[str, models.Recipe], vectors: dict[str, np.ndarray], **rest: object) -> Upgrade:
    """Return an upgrade of 60 pictures, which are learnt, kept and searched, by models whose vectors are known."""
    part = made(labels.tolist())
    task = Task(old=part, new=part, shared=True, pairs=part, gallery=part, queries=None, mirrored=False, steps=(part,) * 3)
    return Upgrade(task=task, workshop=Shelf(vectors), recipes=recipes, seeds=[0], **rest)


@pytest.mark.parametrize("better", [0.0, 1.0])
def test_a_contrast_of_classes_stands_alone_or_beside_a_regression_whichever_is_worth_more(
    legs: tuple[Legs, Ground, np.ndarray], tiny: Scale, better: float
) -> None:
    class Psi:
        def __init__(self, sign: int) -> None:
            self.sign = sign

        def apply(self, vectors: np.ndarray) -> np.ndarray:
            return self.sign * legs[0].old_q[: len(vectors)]

    plan = Plan(method=Method.MCL, settings=tiny.settings)
    assert [each.settings.pull for each in plan.variants] == [0.0, 1.0]
    fits = {(each, 0): Fitted(reverse=Psi(1 if each.settings.pull == better else -1)) for each in plan.variants}
    found = upgraded(legs[2], tiny.recipes(), {"old": legs[0].old_g, "new": legs[0].new_g}, fits=fits).planned("mcl", plan)
    assert found.regression == better
    assert found.curve[0] > 0.25


def test_a_new_models_queries_search_its_own_gallery_and_that_of_each_model_before_it(
    legs: tuple[Legs, Ground, np.ndarray], tiny: Scale
) -> None:
    _, ground, labels = legs
    recipes, rng = tiny.recipes() | tiny.sequence(3), np.random.default_rng(5)
    vectors = {name: rng.normal(size=(60, 8)) + rng.uniform(1, 3) * np.eye(8)[labels] for name in recipes}
    for name in (name for name, recipe in recipes.items() if recipe.zeta is not None):
        vectors[name] = np.column_stack([np.sqrt(1 + np.square(vectors[name]).sum(1)), vectors[name]])  # on the hyperboloid
    upgrade = upgraded(labels, recipes, vectors)

    def quality(queries: str, gallery: str) -> tuple[float, float]:
        metric = Metric.COSINE if recipes[gallery].zeta is None else Metric.LORENTZ
        return rows.quality(vectors[queries], vectors[gallery], ground, metric)

    found = {each["method"]: each for each in settings.compatibility(upgrade, tiny.settings)}
    for name, old in (("bct", "old"), ("hbct", "old-hyperbolic")):
        assert (found[name]["self_cmc"], found[name]["self_map"]) == quality(name, name)
        assert (found[name]["cross_cmc"], found[name]["cross_map"]) == quality(name, old) != quality(name, name)
    row = upgrade.compatible("bct")
    for at, gallery in ((0, "old"), (-1, "bct")):
        assert (row.curve_cmc[at], row.curve[at]) == pytest.approx(quality("bct", gallery))
    for each in settings.sequence(upgrade, tiny.settings):
        chain = [f"alone{'-hyperbolic' * (each['method'] == 'hbct')} 0", *(f"{each['method']} {step}" for step in (1, 2))]
        assert each["self_cmc"] == [quality(name, name)[0] for name in chain]
        assert each["cross_cmc"] == [[quality(chain[i], chain[j])[0] for j in range(i)] for i in (1, 2)]


def test_a_lifted_gallery_is_searched_by_the_new_models_queries(legs: tuple[Legs, Ground, np.ndarray]) -> None:
    class Doubled:
        def apply(self, vectors: np.ndarray) -> np.ndarray:
            return 2 * vectors[:, :8]

    served = legs[0].served(Fitted(lift=Doubled()), side=np.zeros((60, 3), dtype=np.float32))
    assert np.array_equal(served.old_q, legs[0].new_q)
    assert np.array_equal(served.old_g, 2 * legs[0].old_g)


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


def test_rows_without_labels_are_calibrated_by_the_new_models_neighbours(
    legs: tuple[Legs, Ground, np.ndarray], tiny: Scale
) -> None:
    upgrade = upgraded(legs[2], tiny.recipes(), {"old": legs[0].old_g, "new": legs[0].new_g})
    plan, check = Plan(method=Method.MCL, settings=tiny.settings), upgrade.halves[1]
    labels, without = (upgrade.check_ground(replace(plan, labels=each)) for each in (True, False))
    same = legs[2][check][:, None] == legs[2][check][None, :]
    assert np.array_equal(labels.relevance, same & ~np.eye(len(check), dtype=bool))
    assert np.array_equal(
        without.relevance,
        simulated.neighbours(legs[0].new_g[check], legs[0].new_g[check], metric=Metric.COSINE, itself=np.arange(len(check))),
    )
    assert not np.array_equal(without.relevance, labels.relevance)
    assert np.array_equal(without.order, labels.order)


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


@pytest.mark.parametrize("setting", sorted(path.stem for path in RESULTS.glob("*.json") if path.stem != "curves"))
def test_a_page_can_be_made_again_from_its_table(setting: str) -> None:
    found = json.loads((RESULTS / f"{setting}.json").read_text())
    assert report.markdown(found) == (RESULTS / f"{setting}.md").read_text()


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
