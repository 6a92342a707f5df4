"""Torch modules as embedders."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from rmvdb.errors import ModelError
from rmvdb.items.pictures import read_item
from rmvdb.items.probe import same_model
from rmvdb.items.torch import TorchEmbedder
from rmvdb.types import Vectors
from tests.support.embedders import pictures, pixels, small_net


def test_a_torch_module_embeds_in_batches_as_it_would_one_by_one() -> None:
    module = small_net()
    embedder = TorchEmbedder(module, pixels, dim=4, device="cpu", batch_size=3)
    items = pictures(8)
    vectors = embedder.embed(items)
    with torch.no_grad():
        expected = module.eval()(torch.stack([pixels(item) for item in items])).numpy()
    assert (vectors.dtype, vectors.shape) == (np.float32, (8, 4))
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    np.testing.assert_array_equal(embedder.embed(items), vectors)
    assert embedder.embed([]).shape == (0, 4)


def test_a_torch_module_gives_float32_whatever_it_computes_in() -> None:
    module = torch.nn.Linear(2, 2).to(torch.bfloat16)
    embedder = TorchEmbedder(module, lambda item: torch.tensor(item, dtype=torch.bfloat16), device="cpu")
    assert embedder.embed([[1.0, 2.0]]).dtype == np.float32


def test_texts_and_features_reach_the_preprocessing_as_they_are() -> None:
    assert read_item("photos/1.jpg") == "photos/1.jpg"
    features = np.zeros(3, np.float32)
    assert read_item(features) is features
    letters = TorchEmbedder(torch.nn.Embedding(128, 2), lambda text: ord(text[0]), device="cpu")
    assert letters.embed(["a", "b"]).shape == (2, 2)


def test_a_module_of_another_dimension_is_refused() -> None:
    with pytest.raises(ModelError, match=r"gives shape \(2, 4\) for 2 items and must give \(2, 5\)"):
        TorchEmbedder(small_net(), pixels, dim=5, device="cpu").embed(pictures(2))
    with pytest.raises(ModelError, match=r"must give \(2, dim\)"):
        TorchEmbedder(torch.nn.Identity(), pixels, device="cpu").embed(pictures(2))


def test_many_threads_use_one_module() -> None:
    embedder = TorchEmbedder(small_net(), pixels, device="cpu", batch_size=2)
    items = pictures(12)
    expected = embedder.embed(items)
    found: list[Vectors] = []
    threads = [threading.Thread(target=lambda: found.append(embedder.embed(items))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for vectors in found:
        np.testing.assert_array_equal(vectors, expected)


def test_the_best_device_is_chosen_and_gives_the_same_vectors() -> None:
    items = pictures(5)
    on_cpu = TorchEmbedder(small_net(), pixels, device="cpu").embed(items)
    embedder = TorchEmbedder(small_net(), pixels)
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert embedder.device.type == best
    assert same_model(on_cpu, embedder.embed(items), tolerance=1e-5)
