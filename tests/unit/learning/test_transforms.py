"""ψ and ρ as files and as functions."""

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from rmvdb.errors import ArtifactError, Mismatch
from rmvdb.learning.network import Network
from rmvdb.learning.transforms import Config, Norm, Transform


def vectors(n, dim, seed=0):
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def lively(config, seed=0):
    """Return a network whose every weight and running statistic differs from its start."""
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


NORMS = [
    *({"output": norm, "input_scale": scale} for norm in Norm for scale in (None, 2.5)),
    {"output_scale": 3.0},
    {"output": Norm.LIFTED, "output_scale": 1.5},
]
SHAPES = [
    *({"blocks": blocks, "residual": residual} for blocks in (1, 2, 3, 5) for residual in (False, True)),
    *({"blocks": blocks, "skip": True, "d_out": 9} for blocks in (1, 2)),
    {"residual": True, "skip": True},
    *({"blocks": blocks, "branches": True, "side": side, "d_out": 9} for blocks in (1, 3) for side in (0, 5)),
    {"branches": True, "side": 5, "skip": True, "residual": True},
    {"d_in": 300, "d_out": 130, "hidden": 70},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda each: " ".join(f"{name} {value}" for name, value in each.items()))
@pytest.mark.parametrize("norm", NORMS, ids=lambda each: " ".join(map(str, each.values())))
def test_numpy_gives_what_torch_gives(norm, shape):
    config = Config(**{"d_in": 12, "d_out": 12, "hidden": 20, **shape, **norm})
    network = lively(config)
    transform = Transform(network)
    for rows in (0, 1, 2, 17, 200):  # they are multiplied in three ways
        x = vectors(rows, config.d_in + config.side)
        with torch.inference_mode():
            expected = network(torch.from_numpy(x)).numpy()
        actual = transform.apply(x)
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6 * max(1, np.abs(expected).max(initial=0)))


#: Settings, and the SHA-256 of the file of a network with fixed weights, as torch wrote it.
FILES = {
    "e6f22eea3fcb116e080dcd3726bbb85c8818fc0eb8177290b5b46b2baa2664f6": Config(d_in=5, d_out=3, hidden=7),
    "f873efb1d93fd216316473e5d9d44cfb3cfe7e740317876786087601f0bffc30": Config(
        d_in=5, d_out=5, hidden=7, residual=True, output=Norm.KEPT, input_scale=2.5, blocks=3
    ),
    "3a0603e4c63dfa9a1b9147ce6115fefdfe84bd7f85b0cf7bbe58875d4ac36dfa": Config(
        d_in=5, d_out=3, hidden=7, skip=True, output=Norm.FREE, input_scale=2.0, output_scale=3.0
    ),
    "dd1665fccc271f4c7d6963eca7dc15f7ae931638078c3e7c5fd924fbbe5c7aaf": Config(
        d_in=6, d_out=5, side=3, blocks=3, hidden=16, branches=True
    ),
    "ff7b7a7f2050d8aeb8b99506f1777bfe978b7bb16729e439e472759a27bd25ec": Config(
        d_in=6, d_out=5, hidden=8, output=Norm.LIFTED, input_scale=1.0, output_scale=1.5
    ),
}


@pytest.mark.parametrize("sha256", FILES)
def test_the_file_of_a_network_is_byte_for_byte_what_torch_wrote(sha256):
    network, rng = Network(FILES[sha256]), np.random.default_rng(0)
    for _, tensor in sorted(network.state_dict().items()):
        if tensor.is_floating_point():
            tensor.copy_(torch.from_numpy(rng.uniform(0.1, 1.1, tensor.shape).astype(np.float32)))
    data = Transform(network).to_bytes()
    assert hashlib.sha256(data).hexdigest() == sha256
    assert Transform.from_bytes(data).to_bytes() == data


def test_arrays_of_another_network_are_refused():
    good = Transform(Network(Config(d_in=5, d_out=3)))
    metadata = {"config": json.dumps({"format": 1, "d_in": 5, "d_out": 4, "output": "fixed"})}
    arrays = load(good.to_bytes())
    for wrong in (arrays, {**arrays, "more.weight": torch.ones(2)}, {name: each.half() for name, each in arrays.items()}):
        with pytest.raises(ArtifactError, match="does not fit its array"):
            Transform.from_bytes(save(wrong, metadata=metadata))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a library shares nothing out on one core")
def test_no_thread_goes_on_computing_after_a_query_was_mapped():
    transform, query = Transform(Network(Config(d_in=512, d_out=512, hidden=1024))), vectors(1, 512)
    spent = []
    for _ in range(5):
        transform.apply(query)
        before = time.process_time()
        time.sleep(0.05)
        spent.append(time.process_time() - before)
    assert min(spent) < 0.002  # threads of a product that was shared out spin for 20 ms


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
    first, second = vectors(512, 1024), vectors(1024, 512)

    def products():
        # By one thread, on any machine; it takes about twice as long as a library's product.
        np.einsum("nd,de->ne", np.maximum(np.einsum("nd,de->ne", query, first), 0), second)

    def shortest(call):
        times = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    assert shortest(lambda: transform.apply(query)) < 2 * shortest(products)  # 0.1 ms on one core
