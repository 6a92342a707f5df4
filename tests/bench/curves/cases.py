"""The cases: what is stored, what is searched for, what is relevant, and the two or three models that follow each other."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from examples import demo_data, demo_models
from examples.pretrained.files import Missing, folder, place
from tests.bench.curves import made_texts

#: The share of the gallery that planning may look at.
SAMPLE = 0.4
MODELS = "tests.bench.curves.models"


@dataclass(frozen=True, kw_only=True)
class Version:
    """A model: the entry point of its embedder and its options."""

    embedder: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One gallery that changes its model."""

    name: str
    title: str
    #: `precision@10`, `nDCG@10` or `mAP`.
    metric: str
    #: Oldest first. With three, the last upgrade begins while the one before is at t = 0.4.
    versions: Sequence[Version]
    source: str
    records: Sequence[Mapping[str, Any]]
    queries: Sequence[Any]
    #: Which records answer a query, (Q, G).
    relevant: np.ndarray

    @property
    def sample(self) -> int:
        """Records that planning may look at."""
        return int(SAMPLE * len(self.records))

    @property
    def limit(self) -> int:
        """Hits that the metric needs."""
        return len(self.records) if self.metric == "mAP" else 10


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of each set is used."""

    photos: int = 2500
    photo_queries: int = 300
    digits: int = 1000
    #: Made sentences.
    texts: int = 300
    #: Shares of the gallery that are re-embedded when quality is measured.
    ts: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def photos(seed: int, at: Path, data: Path, sizes: Sizes) -> Case:
    """a: CIFAR-100's test pictures, EfficientNet-Lite0 at 112 pixels to Lite2 at 160, both trained on ImageNet by others."""
    for name in ("lite", "lite0", "lite2"):
        folder(name)
    images, labels, _ = _reader(data, "cifar100")("test")
    # The same pictures for every seed, so that each is embedded once; another part of them is searched for.
    pool = np.random.default_rng(0).permutation(len(images))[: sizes.photos + sizes.photo_queries]
    rows = np.random.default_rng(seed).permutation(pool)
    kept = place() / "cifar100"
    kept.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if not (file := kept / f"{row}.png").exists():
            Image.fromarray(images[row]).save(file)
    asked, stored = rows[: sizes.photo_queries], rows[sizes.photo_queries :]
    return Case(
        name="a",
        title="photos: CIFAR-100 test pictures, EfficientNet-Lite0 → Lite2",
        metric="precision@10",
        versions=[Version(embedder=f"{MODELS}:lite0"), Version(embedder=f"{MODELS}:lite2")],
        source=f"folder:{kept}/{{id}}.png",
        records=[{"id": int(row), "item": kept / f"{row}.png"} for row in stored],
        queries=[kept / f"{row}.png" for row in asked],
        relevant=labels[asked][:, None] == labels[stored][None, :],
    )


def _cranfield(name: str, title: str, models: Sequence[str]) -> Callable[[int, Path, Path, Sizes], Case]:
    def make(seed: int, at: Path, data: Path, sizes: Sizes) -> Case:
        for model in models:
            folder(model)
        ids, texts, queries, answers = _reader(data, "cranfield")()
        stored = [{"id": int(id), "text": text or "(no text)"} for id, text in zip(ids, texts, strict=True)]
        return Case(
            name=name,
            title=title,
            metric="nDCG@10",
            versions=[Version(embedder=f"{MODELS}:{model}") for model in models],
            source="field:text",
            records=stored,
            queries=list(queries),
            relevant=np.array([[record["id"] in wanted for record in stored] for wanted in answers]),
        )

    return make


def digits(seed: int, at: Path, data: Path, sizes: Sizes) -> Case:
    """d: scikit-learn's digits, two small nets trained here, apart from each other: v1 on the digits 0-4, v2 on all ten."""
    pictures = demo_data.digits(seed)
    stored = np.concatenate([pictures.labelled.images, pictures.plain.images])[: sizes.digits]
    labels = np.concatenate([pictures.labelled.labels, pictures.plain.labels])[: sizes.digits]
    for number, classes in enumerate((5, 10)):
        _train(pictures, number, classes, seed, at / f"v{number + 1}.safetensors")
    for name, images in (("photos", stored), ("queries", pictures.queries.images)):
        (at / name).mkdir(exist_ok=True)
        for row, image in enumerate(images):
            Image.fromarray(image).save(at / name / f"{row}.png")
    return Case(
        name="d",
        title="digits: scikit-learn's, two small nets",
        metric="mAP",
        versions=[Version(embedder=f"{MODELS}:digits", options={"weights": str(at / f"v{n}.safetensors")}) for n in (1, 2)],
        source=f"folder:{at}/photos/{{id}}.png",
        records=[{"id": row, "item": at / "photos" / f"{row}.png"} for row in range(len(stored))],
        queries=[at / "queries" / f"{row}.png" for row in range(len(pictures.queries))],
        relevant=pictures.queries.labels[:, None] == labels[None, :],
    )


def _train(pictures: demo_data.Pictures, number: int, classes: int, seed: int, file: Path) -> None:
    part = pictures.taught.of_classes(classes)
    shape = demo_models.Shape(
        side=8, channels=1, widths=pictures.widths[number], dim=pictures.dims[number], classes=classes
    )  # fmt: skip
    net, _ = demo_models.train(shape, part.images, part.labels, epochs=pictures.epochs[number], seed=10 * seed + number)
    demo_models.save(net, file)


def made(seed: int, at: Path, data: Path, sizes: Sizes) -> Case:
    """m: sentences made here of words with synonyms; v2 knows more of the synonyms than v1. It needs no file."""
    texts, queries, relevant = made_texts.collection(seed, sizes.texts, 60)
    return Case(
        name="m",
        title="made sentences, two hashing models",
        metric="nDCG@10",
        versions=[Version(embedder=f"{MODELS}:made_old"), Version(embedder=f"{MODELS}:made_new")],
        source="field:text",
        records=[{"id": row, "text": text} for row, text in enumerate(texts)],
        queries=queries,
        relevant=relevant,
    )


def _reader(data: Path, name: str) -> Callable[..., Any]:
    if not (data / "load.py").is_file():
        raise Missing(f"{data / 'load.py'} is not there; name the folder of the data: make curves DATA=FOLDER")
    read: Callable[..., Any] | None = runpy.run_path(str(data / "load.py")).get(name)
    if read is None:
        raise Missing(f"{data / 'load.py'} has no {name}()")
    return read


#: Each takes a seed, a folder for what it makes, the folder of the data, and the sizes.
CASES: Mapping[str, Callable[[int, Path, Path, Sizes], Case]] = {
    "a": photos,
    "b": _cranfield("b", "Cranfield: static words → MiniLM", ("words", "minilm")),
    "c": _cranfield("c", "Cranfield: MiniLM → BGE-small with query prompts", ("minilm", "bge")),
    "bc": _cranfield("bc", "Cranfield: MiniLM → BGE-small while static words → MiniLM is at t = 0.4", ("words", "minilm", "bge")),
    "d": digits,
    "m": made,
}
