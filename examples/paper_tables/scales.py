"""How large a table is: ResNets on a GPU, small networks or heads on a CPU; and the models that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from examples.paper_tables.backbones import RESNETS
from examples.paper_tables.features import EYES
from examples.paper_tables.models import SIMCLR, Recipe
from examples.paper_tables.tasks import Sizes
from rmvdb.learning.training import TrainingSettings

LEAST_EPOCHS = 60
#: The clipping norms of HBCT's old and new models (section 4.4).
ZETAS = (1.0, 1.2)
#: The losses that pull towards the old model, with the weights of classification and pull if they are not the loss's own: HBCT
#: weighs every loss by a λ of its choice between 0 and 1, ours are chosen once, by the size of the terms.
LOSSES = {"l2": (1.0, 0.01), "bct": None, "ract": None, "hoc": (1.0, 0.3), "advbct": (1.0, 0.3)}
#: The losses that are compared over five updates, by space.
SEQUENCE = {"": ("bct", "ract", "hoc"), "-hyperbolic": ("hbct",)}
#: BiCT's new model is trained by BCT with this weight, then the old gallery is lifted.
BICT = (1.0, 0.1)
#: Of heads, until they are no better; where they are compared by their pull to an old model, until that has had its effect.
HEAD_EPOCHS, PULLED_EPOCHS = 30, 60
#: The share of pictures kept from heads to choose weights of losses by.
HELD = 0.1


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Networks, epochs and numbers of pictures; rows of two scales are never in one table."""

    #: Of the old model and of the new ones.
    backbones: tuple[str, str]
    epochs: int
    lr: float = 0.1
    batch: int = 128
    #: How much longer than usual the normals of hyperbolic classifiers begin: few epochs would not let them grow.
    steepness: float = 1.0
    sizes: Sizes = field(default_factory=Sizes)
    #: The share of pictures that weights of losses are chosen by, where a table keeps none.
    held: float = 0.0
    #: How ψ and ρ are trained, but for the seed.
    settings: TrainingSettings = field(default_factory=TrainingSettings)

    @property
    def name(self) -> Literal["full", "small", "heads"]:
        """Full: ResNets, 60 epochs or more, and every picture. Heads: on the features of frozen networks."""
        if set(self.backbones) <= set(EYES):
            return "heads"
        whole = self.sizes == Sizes() and self.epochs >= LEAST_EPOCHS
        return "full" if whole and set(self.backbones) <= set(RESNETS) else "small"

    def recipes(self, number: int = 0, weighed: Mapping[str, Recipe] | None = None) -> dict[str, Recipe]:
        """Every model that a table may need, by name; a hyperbolic one pulls to a hyperbolic old one.

        `number` is of the training. `weighed` are recipes whose weights and temperatures are taken.
        """
        first, second, third = (10 * number + seed for seed in (1, 2, 3))
        old = self._recipe("old", "old", seed=first)
        plain = self._recipe("new", "new", seed=second)
        curved = self._recipe("old-hyperbolic", "old", zeta=ZETAS[0], seed=first)
        hyperbolic = self._recipe("new-hyperbolic", "new", zeta=ZETAS[1], seed=second)
        made = [old, plain, curved, hyperbolic]
        made += [replace(plain, name=name, loss=name, weights=weights, after=old) for name, weights in LOSSES.items()]
        made.append(replace(plain, name="bict", loss="bct", weights=BICT, after=old))
        made += [replace(hyperbolic, name=name, loss=name, after=curved) for name in ("hbct", "hbct-no-entail")]
        made.append(self._recipe("side", "old", loss=SIMCLR, seed=third))
        found = {recipe.name: recipe for recipe in made}
        for name, recipe in (weighed or {}).items():
            found[name] = replace(found[name], weights=recipe.weights, temperature=recipe.temperature)
        return found

    def sequence(self, steps: int) -> dict[str, Recipe]:
        """HBCT's Figure 5: `bct 3` after `bct 2`, and `alone 3` without a thought of it; all of a space have one first model."""
        made: dict[str, Recipe] = {}
        for space in ("", "-hyperbolic"):
            alone = [self._step(f"alone{space}", number, hyperbolic=bool(space)) for number in range(steps)]
            made |= {recipe.name: recipe for recipe in alone}
            for loss in SEQUENCE[space]:
                last = alone[0]
                for number, plain in enumerate(alone[1:], start=1):
                    last = replace(plain, name=f"{loss} {number}", loss=loss, weights=LOSSES.get(loss), after=last)
                    made[last.name] = last
        return made

    def _step(self, name: str, number: int, *, hyperbolic: bool) -> Recipe:
        """Of the larger architecture from the third model on; each hyperbolic one reaches a little further out."""
        backbone, further = self.backbones[number > 1], ZETAS[1] - ZETAS[0]
        zeta = ZETAS[0] + further * number if hyperbolic else None
        recipe = self._recipe(f"{name} {number}", "old", zeta=zeta, seed=number + 1)
        return replace(recipe, taught=str(number), backbone=backbone)

    def _recipe(self, name: str, taught: Literal["old", "new"], **rest: object) -> Recipe:
        backbone = self.backbones[taught == "new"]
        rest = {"epochs": self.epochs, "lr": self.lr, "batch": self.batch, **rest}
        made = Recipe(name=name, taught=taught, backbone=backbone, **rest)
        return made if made.zeta is None else replace(made, steepness=self.steepness)


def chosen(device: torch.device, *, wider: bool) -> Scale:
    """Return the scale that suits the device. `wider`: the new model's architecture is larger than the old one's."""
    if device.type == "cuda":
        return Scale(backbones=("resnet18", "resnet50" if wider else "resnet18"), epochs=LEAST_EPOCHS)
    return Scale(
        backbones=("small", "small-wide" if wider else "small"),
        epochs=8,
        steepness=16.0,
        sizes=Sizes(taught=16_000, searched=1_500),
    )


def heads(*, wider: bool, pictures: int | None, kept: float) -> Scale:
    """Heads on the features of EfficientNets, from so many pictures of training; a `kept` share of them is not for models."""
    epochs = HEAD_EPOCHS if kept else PULLED_EPOCHS
    kept = kept or HELD
    return Scale(
        held=HELD,
        backbones=("lite0", "lite2" if wider else "lite0"),
        epochs=epochs,
        sizes=Sizes()
        if pictures is None
        else Sizes(taught=round(pictures * (1 - kept)), paired=round(pictures * kept), searched=pictures // 5),
    )
