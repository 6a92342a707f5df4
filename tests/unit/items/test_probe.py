"""Fingerprints and probes tell one model from another."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rmvdb.catalog.versions import check_model, probe
from rmvdb.errors import ModelError
from rmvdb.items.check import CheckedEmbedder
from rmvdb.items.fingerprint import fingerprint
from rmvdb.items.kinds import KINDS
from rmvdb.items.probe import probe_vectors, same_model
from rmvdb.items.torch import TorchEmbedder
from rmvdb.registry.tables import VersionRow
from rmvdb.types import Item, Vectors
from tests.support.embedders import Gives, Words, pixels, small_net


def test_weights_that_cannot_be_read_are_named() -> None:
    class Elsewhere(Words):
        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"weight": torch.empty(2, device="meta")}

    with pytest.raises(ModelError, match=r"The weights weight cannot be read: .*; load them as plain tensors"):
        fingerprint(Elsewhere())


def test_a_fingerprint_follows_the_weights() -> None:
    def of(module: torch.nn.Module) -> str | None:
        return fingerprint(TorchEmbedder(module, pixels, device="cpu"))

    first = of(small_net())
    assert first is not None
    assert len(first) == 64
    assert of(small_net()) == first
    assert of(small_net(seed=1)) != first
    assert of(small_net().to(torch.bfloat16)) not in (None, first)
    changed = small_net()
    changed.get_parameter("4.bias").data[0] += 1e-3
    assert of(changed) != first


def test_weights_are_found_where_they_usually_are() -> None:
    class Own:
        def __init__(self) -> None:
            self.model = small_net()

        def embed(self, items: Sequence[Item]) -> Vectors:
            return np.zeros((len(items), 4), np.float32)

    expected = fingerprint(TorchEmbedder(small_net(), pixels, device="cpu"))
    assert fingerprint(Own()) == expected
    assert fingerprint(CheckedEmbedder(Own(), dim=4)) == expected
    assert fingerprint(Words()) is None
    assert fingerprint(TorchEmbedder(torch.nn.Identity(), pixels, device="cpu")) is None


def test_probes_are_the_same_for_ever() -> None:
    images = KINDS["image"].probes()
    assert [(image.size, image.mode) for image in images] == [((224, 224), "RGB")] * 4
    digest = hashlib.sha256(b"".join(image.tobytes() for image in images)).hexdigest()
    assert digest == "fb2e0407673021fae45dabafd9c65a36093be807f653090b383c3f038bb14887"
    assert len(set(KINDS["text"].probes())) == 4


def test_probes_tell_one_model_from_another() -> None:
    def of(module: torch.nn.Module) -> Vectors:
        return probe_vectors(TorchEmbedder(module, pixels, device="cpu"), dim=4, kind="image")

    first = of(small_net())
    assert same_model(first, of(small_net()))
    assert same_model(first, first * np.float32(1 + 1e-4))
    assert not same_model(first, of(small_net(seed=1)))
    assert not same_model(first, first * 2)
    turned = np.roll(np.eye(4, dtype=np.float32), 1, axis=0) * np.array([[1], [-1], [1], [-1]], np.float32)  # every vector by 90°
    a_step_of_training = first + np.float32(0.05) * first @ turned  # a cosine distance of about 1e-3
    assert not same_model(first, a_step_of_training)
    assert not same_model(first, -first)
    assert not same_model(first, first[:, :3])


def test_the_kind_of_probe_is_found_by_trying() -> None:
    images = TorchEmbedder(small_net(), pixels, device="cpu")
    kind, found, _ = probe(images, kind=None)
    assert kind == "image"
    assert found is not None
    np.testing.assert_array_equal(found, probe_vectors(images, dim=4, kind="image"))
    assert probe(Words(), kind=None)[0] == "text"
    features = TorchEmbedder(torch.nn.Linear(2, 2), torch.as_tensor, device="cpu")
    assert probe(features, kind=None)[:2] == (None, None)


def test_an_embedder_that_fails_on_its_own_kind_is_broken() -> None:
    images = TorchEmbedder(small_net(), pixels, device="cpu")
    with pytest.raises(ModelError, match="fails for each of 4 items"):
        probe_vectors(images, dim=4, kind="text")

    def only_short(items: Sequence[Item]) -> Vectors:
        if any(len(item) > 20 for item in items):
            raise ValueError("too long")
        return np.ones((len(items), 2), np.float32)

    with pytest.raises(ModelError, match="fails for 3 of 4 text probes: ValueError: too long; fix the embedder"):
        probe_vectors(Gives(only_short), dim=2, kind="text")


def test_the_dimension_of_tensors_that_need_gradients_is_found() -> None:
    class Trains(Words):
        def embed(self, items: Sequence[Item]) -> torch.Tensor:  # type: ignore[override]
            return torch.tensor(super().embed(items), requires_grad=True)

    kind, vectors, _ = probe(Trains(), kind=None)
    assert kind == "text"
    assert vectors is not None
    assert vectors.shape[1] == 3


def test_a_model_that_loads_its_weights_on_first_use_is_the_registered_one() -> None:
    class Lazy(Words):
        model: torch.nn.Module | None = None

        def __init__(self, seed: int = 0) -> None:
            super().__init__()
            self.seed = seed

        def embed(self, items: Sequence[Item]) -> Vectors:
            self.model = self.model or small_net(seed=self.seed)
            return super().embed(items)

    first = Lazy()
    vectors = probe_vectors(first, dim=3, kind="text")
    row = VersionRow(
        name="lazy", dim=3, fingerprint=fingerprint(first), probes=vectors.tobytes(), probe_kind="text", query_probes=None
    )
    assert check_model(row, Lazy())
    with pytest.raises(ModelError, match="The weights of model version 'lazy' are not the registered ones"):
        check_model(row, Lazy(seed=1))
