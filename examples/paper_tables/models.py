"""Trains the models of a table, and keeps weights and embeddings with a checksum, so that rows are measured again quickly."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils.data import Dataset

from examples.paper_tables import features, simclr
from examples.paper_tables.backbones import Backbone
from examples.paper_tables.data import Pictures
from examples.paper_tables.heads import Head
from examples.paper_tables.tasks import Task
from rmvdb.learning import compatible
from rmvdb.learning.compatible import Model
from rmvdb.learning.losses import hbct, lorentz

DIM = 128
SIMCLR = "simclr"
#: Pixels by which a picture is shifted at most while a model learns.
SHIFT = 4
#: Fields of recipes that came when there were names already: they are in a name only where they differ from what was before them.
LATER = ("steepness",)
#: Called with a sentence.
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a model's weights depend on, beside the pictures."""

    name: str
    #: Which pictures of the task it learns: `old`, `new`, or the number of a step.
    taught: str
    backbone: str
    #: Of `compatible.Loss`, or SIMCLR.
    loss: str = "plain"
    weights: tuple[float, float] | None = None
    temperature: float | None = None
    #: Where it ends in hyperbolic space: the clipping norm.
    zeta: float | None = None
    #: How much longer than usual the normals of its classifier begin there.
    steepness: float = 1.0
    #: The model that it shall be comparable with.
    after: Recipe | None = None
    epochs: int = 60
    lr: float = 0.1
    batch: int = 128
    seed: int = 0

    @property
    def method(self) -> str:
        """Its name without the number of a step."""
        return self.name.split()[0]


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """Embeddings of a part, (n, DIM) or, in hyperbolic space, (n, DIM + 1), and each highest class probability (n,)."""

    vectors: np.ndarray
    score: np.ndarray


class Items(Dataset):
    """Pictures, or features of them, with labels; pictures shifted and mirrored at random, where a model learns from them."""

    def __init__(self, pictures: Pictures, device: torch.device, *, shaken: bool, mirrored: bool = False) -> None:
        self.images = torch.from_numpy(pictures.images).to(device)
        self.labels = torch.from_numpy(pictures.labels)
        self.shaken, self.mirrored = shaken, mirrored

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([row])
        return images[0], labels[0]

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """A whole batch at once, which a loader asks for where it can."""
        images = self.images[torch.tensor(rows, device=self.images.device)]
        if self.shaken:
            images = shifted(images, mirrored=self.mirrored)
        return images, self.labels[rows]

    @staticmethod
    def collate_fn(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Leave a batch as it is: taking it apart and putting it together takes longer than a head's step."""
        return batch


def shifted(images: Tensor, *, mirrored: bool) -> Tensor:
    """Pictures (n, 3, h, w), each shifted by up to SHIFT pixels and, one in two, mirrored."""
    n, _, height, width = images.shape
    padded = nn.functional.pad(images, (SHIFT,) * 4)
    down, right = torch.randint(0, 2 * SHIFT + 1, (2, n, 1), device=images.device)
    rows = down + torch.arange(height, device=images.device)  # (n, h)
    columns = torch.arange(width, device=images.device).expand(n, width)
    if mirrored:
        columns = torch.where(torch.rand(n, 1, device=images.device) < 0.5, columns.flip(1), columns)
    number = torch.arange(n, device=images.device)[:, None, None]
    return padded[number, :, rows[:, :, None], (right + columns)[:, None, :]].permute(0, 3, 1, 2)


class Workshop:
    """The models of one task, trained when they are asked for and not found in the folder."""

    def __init__(self, task: Task, folder: Path, *, device: torch.device, say: Say = print) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._task, self.folder, self._device, self._say = task, folder, device, say
        self._trained: dict[Recipe, Model] = {}
        shown = task.taught | {"pairs": task.pairs, "gallery": task.gallery, "queries": task.queries}
        self._prints = {name: _fingerprint(pictures) for name, pictures in shown.items()}
        #: Every file that embeddings were read from or written to, with its SHA-256.
        self.files: dict[str, str] = {}
        #: The models that were asked for, and the seconds spent training just now.
        self.used: set[Recipe] = set()
        self.training = 0.0

    def embedded(self, recipe: Recipe, part: Literal["pairs", "gallery", "queries"]) -> Embedded:
        """A part as that model sees it; raises ModelError where the training diverges."""
        name = self.name(recipe, part)
        self.used.add(recipe)
        found = _read(self.folder / name)
        if found is None:
            found = self._embed(self.model(recipe), getattr(self._task, part))
            _write(self.folder / name, found)
        self.files[name] = _note(self.folder / name)["sha256"]
        return Embedded(vectors=found["vectors"].numpy(), score=found["score"].numpy())

    def name(self, recipe: Recipe, part: str) -> str:
        """Of the file with those embeddings: another one where anything is other that they depend on."""
        return f"{recipe.name}-{part}-{_hash(self._key(recipe), self._prints[part])}.safetensors"

    @property
    def seconds(self) -> float:
        """How long the models that were asked for took to train, now or when they were."""
        return sum(note.get("seconds", 0.0) for note in self._notes())

    @property
    def threads(self) -> list[int]:
        """The numbers of CPU threads, on which weights depend: of this process, and of those that trained what was asked for."""
        return sorted({torch.get_num_threads(), *(note["threads"] for note in self._notes() if "threads" in note)})

    def _notes(self) -> Iterator[dict[str, Any]]:
        return (_note(self.folder / self._weights_name(recipe)) for recipe in self.used)

    def model(self, recipe: Recipe) -> Model:
        """The trained model."""
        if recipe not in self._trained:
            self._trained[recipe] = self._loaded(recipe) or self._taught(recipe)
        return self._trained[recipe]

    def _loaded(self, recipe: Recipe) -> Model | None:
        found = _read(self.folder / self._weights_name(recipe))
        if found is None:
            return None
        model = self._fresh(recipe)
        _whole(model).load_state_dict(found)
        _whole(model).eval()
        return model

    def _taught(self, recipe: Recipe) -> Model:
        old = None if recipe.after is None else self.model(recipe.after)
        self._say(f"training {recipe.name}: {recipe.backbone}, {recipe.epochs} epochs")
        began = time.perf_counter()
        model = self._fresh(recipe)
        taught = self._task.taught[recipe.taught]
        items = Items(taught, self._device, shaken=taught.images.ndim == 4, mirrored=self._task.mirrored)
        if recipe.loss == SIMCLR:
            kept = {"epochs": recipe.epochs, "lr": recipe.lr, "seed": recipe.seed}
            simclr.train(model.module, items.images, dim=DIM, mirrored=self._task.mirrored, **kept)
        else:
            compatible.train(model, items, loss=recipe.loss, old=self._reference(old), settings=_settings(recipe))
        seconds = round(time.perf_counter() - began, 1)
        self.training += seconds
        self._say(f"trained {recipe.name} in {seconds:.0f} s")
        note = {"seconds": seconds, "threads": torch.get_num_threads()}
        _write(self.folder / self._weights_name(recipe), _whole(model).state_dict(), **note)
        return model

    def _reference(self, old: Model | None) -> Model | None:
        """The old model with its classifier only where its classes are the first of the new ones."""
        return old if old is None or self._task.shared else Model(module=old.module)

    def _fresh(self, recipe: Recipe) -> Model:
        torch.manual_seed(recipe.seed)
        classes = int(self._task.taught[recipe.taught].labels.max()) + 1
        module: nn.Module = (Head if recipe.backbone in features.EYES else Backbone)(recipe.backbone, dim=DIM)
        if recipe.loss == SIMCLR:
            return Model(module=module.to(self._device))
        classifier: nn.Module = nn.Linear(DIM, classes, bias=False)
        if recipe.zeta is not None:
            module = nn.Sequential(module, lorentz.Lift(zeta=recipe.zeta))
            classifier = hbct.Classifier(DIM, classes, steepness=recipe.steepness)
        return Model(module=module.to(self._device), classifier=classifier.to(self._device))

    @torch.inference_mode()
    def _embed(self, model: Model, pictures: Pictures) -> dict[str, Tensor]:
        items = Items(pictures, self._device, shaken=False)
        vectors, _ = compatible.embed(model.module, items)
        score = torch.zeros(len(vectors))
        if model.classifier is not None:
            score = model.classifier(vectors.to(self._device)).softmax(1).amax(1).cpu()
        return {"vectors": vectors.contiguous(), "score": score}

    def _key(self, recipe: Recipe) -> str:
        parts = [_told(recipe), self._prints[recipe.taught], self._task.shared]
        return _hash(json.dumps(parts), "" if recipe.after is None else self._key(recipe.after))

    def _weights_name(self, recipe: Recipe) -> str:
        return f"{recipe.name}-weights-{self._key(recipe)}.safetensors"


def weights_of(recipes: Iterable[Recipe]) -> dict[str, tuple[float, float]]:
    """Of the classification and of the pull, for each method that pulls a model towards the one before it."""
    pulling = sorted((recipe for recipe in recipes if recipe.after), key=lambda recipe: recipe.name)
    return {recipe.method: recipe.weights or compatible.Loss(recipe.loss).weights for recipe in pulling}


def _told(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe that name its model, but for the model before it."""
    usual = {field.name: field.default for field in fields(recipe)}
    told = asdict(recipe) | {"after": None}
    return {name: value for name, value in told.items() if name not in LATER or value != usual[name]}


def _settings(recipe: Recipe) -> compatible.Settings:
    return compatible.Settings(
        epochs=recipe.epochs,
        batch=recipe.batch,
        lr=recipe.lr,
        weights=recipe.weights,
        temperature=recipe.temperature,
        seed=recipe.seed,
    )


def _whole(model: Model) -> nn.ModuleList:
    return nn.ModuleList([part for part in (model.module, model.classifier) if part is not None])


def _fingerprint(pictures: Pictures | None) -> str:
    if pictures is None:
        return ""
    found = hashlib.sha256(np.ascontiguousarray(pictures.images))
    found.update(np.ascontiguousarray(pictures.labels))
    return found.hexdigest()


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _write(path: Path, tensors: dict[str, Tensor], **note: float) -> None:
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    path.write_bytes(data)
    path.with_suffix(".json").write_text(json.dumps({"sha256": hashlib.sha256(data).hexdigest(), **note}))


def _note(path: Path) -> dict:
    note = path.with_suffix(".json")
    return json.loads(note.read_text()) if note.is_file() else {}


def _read(path: Path) -> dict[str, Tensor] | None:
    """Return the contents that were written. Return None if the file is missing or damaged."""
    data = path.read_bytes() if path.is_file() else b""
    return load(data) if data and hashlib.sha256(data).hexdigest() == _note(path).get("sha256") else None
