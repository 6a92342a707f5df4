"""ψ and ρ as files and as functions."""

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from rmvdb.errors import ArtifactError, Mismatch
from rmvdb.learning.transforms import Config, Network, Norm, Transform


def vectors(n, dim, seed=0):
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def lively(config, seed=0):
    """A network whose every weight and running statistic differs from its start."""
    torch.manual_seed(seed)
    network = Network(config)
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.1)
    return network.eval()


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("residual", [False, True])
def test_apply_is_the_trained_network_with_batch_norm_folded_away(blocks, residual):
    network = lively(Config(d_in=6, d_out=6, hidden=10, blocks=blocks, residual=residual))
    x = vectors(7, 6)
    with torch.inference_mode():
        expected = network(torch.from_numpy(x)).numpy()
    actual = Transform(network).apply(x)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_the_last_block_is_linear_only_and_the_others_are_linear_batch_norm_relu():
    names = [type(layer).__name__ for layer in Network(Config(d_in=4, d_out=3, blocks=3, hidden=8)).body]
    assert names == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d", "ReLU", "Linear"]


@pytest.mark.parametrize(
    ("output", "input_scale"), [(Norm.FIXED, None), (Norm.KEPT, 3.0), (Norm.FREE, 3.0)], ids=["COSINE", "IP", "L2"]
)
def test_a_residual_head_starts_at_the_identity(output, input_scale):
    x = vectors(5, 8) * 2
    scale = 1.0 if output is Norm.FIXED else 3.0
    config = Config(d_in=8, d_out=8, residual=True, output=output, input_scale=input_scale, output_scale=scale)
    expected = x / np.linalg.norm(x, axis=1, keepdims=True) if output is Norm.FIXED else x
    np.testing.assert_allclose(Transform(Network(config)).apply(x), expected, rtol=1e-5, atol=1e-6)


def test_a_cosine_output_has_length_one_and_an_ip_output_the_old_gallerys_length():
    for scale in (1.0, 7.5):
        out = Transform(lively(Config(d_in=4, d_out=6, output_scale=scale))).apply(vectors(9, 4))
        np.testing.assert_allclose(np.linalg.norm(out, axis=1), scale, rtol=1e-5)


def test_an_l2_output_keeps_the_length_that_the_network_gives():
    out = Transform(lively(Config(d_in=4, d_out=6, output=Norm.FREE, output_scale=2.0, input_scale=1.0))).apply(vectors(9, 4))
    assert np.ptp(np.linalg.norm(out, axis=1)) > 0.1


def test_a_file_gives_back_the_same_transform():
    transform = Transform(lively(Config(d_in=5, d_out=5, hidden=7, residual=True, output=Norm.KEPT, input_scale=2.5)))
    again = Transform.from_bytes(transform.to_bytes())
    x = vectors(4, 5)
    assert again.config == transform.config
    assert again.apply(x).tobytes() == transform.apply(x).tobytes()


def test_the_same_transform_always_has_the_same_sha256():
    transform = Transform(lively(Config(d_in=5, d_out=3)))
    digests = {
        hashlib.sha256(data).hexdigest() for data in (transform.to_bytes(), Transform.from_bytes(transform.to_bytes()).to_bytes())
    }
    assert len(digests) == 1


def test_a_file_that_is_not_a_transform_is_refused():
    good = Transform(lively(Config(d_in=5, d_out=3))).to_bytes()
    config = json.dumps({"format": 1, "d_in": 5})
    for bad in (b"", b"hello", good[:-40], good[:50], save(load(good)), save(load(good), metadata={"config": config})):
        with pytest.raises(ArtifactError, match="not a transform"):
            Transform.from_bytes(bad)


def test_vectors_of_another_dimension_are_refused():
    transform = Transform(Network(Config(d_in=5, d_out=3)))
    for wrong in (vectors(2, 4), vectors(1, 5)[0]):
        with pytest.raises(Mismatch, match=r"\(n, 5\)"):
            transform.apply(wrong)


def test_blocks_and_residuals_that_make_no_sense_are_refused():
    for wrong in ({"blocks": 0}, {"blocks": 6}, {"residual": True}):
        with pytest.raises(Mismatch):
            replace(Config(d_in=5, d_out=3), **wrong)


def test_no_vectors_and_vectors_that_cannot_be_written_to_are_fine():
    transform = Transform(Network(Config(d_in=5, d_out=3)))
    frozen = vectors(2, 5)
    frozen.flags.writeable = False
    assert transform.apply(frozen).shape == (2, 3)
    assert transform.apply(np.empty((0, 5), dtype=np.float32)).shape == (0, 3)


def test_many_threads_get_what_one_thread_gets():
    transform = Transform(lively(Config(d_in=16, d_out=8)))
    queries = [vectors(3, 16, seed) for seed in range(64)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(transform.apply, queries))
    assert all((a == transform.apply(q)).all() for a, q in zip(together, queries, strict=True))


def test_one_query_costs_little_more_than_its_matrix_products():
    transform, query = Transform(Network(Config(d_in=512, d_out=512, hidden=1024))), vectors(1, 512)
    first, second = torch.randn(512, 1024), torch.randn(1024, 512)

    def products():
        (torch.from_numpy(query) @ first).relu() @ second

    def shortest(call):
        times = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    assert shortest(lambda: transform.apply(query)) < 5 * shortest(products)  # 0.2 ms on one core
