"""Fingerprints of a model's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rmvdb.errors import ModelError
from rmvdb.protocols import Embedder


def fingerprint(embedder: Embedder) -> str | None:
    """Return the SHA-256 over the weights' names, types, shapes and bytes; None if the embedder shows no weights.

    The weights are in `state_dict()` of the embedder, of its `module` or `model`, or of the embedder that it wraps.
    """
    weights = {name: value for name, value in _state(embedder).items() if hasattr(value, "shape")}
    if not weights:
        return None
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        kind = str(value.dtype).removeprefix("torch.")
        digest.update(f"{name} {kind} {tuple(value.shape)}\n".encode())
        try:
            digest.update(_raw_bytes(value))
        except (RuntimeError, TypeError) as exc:  # the weights are not in memory, or in an unusual layout
            raise ModelError(f"The weights {name} cannot be read: {exc}; load them as plain tensors") from exc
    return digest.hexdigest()


def _state(embedder: object) -> Mapping[str, Any]:
    for owner in (embedder, getattr(embedder, "module", None), getattr(embedder, "model", None)):
        state_dict = getattr(owner, "state_dict", None)
        if callable(state_dict):
            state: Mapping[str, Any] = state_dict()
            return state
    inner = getattr(embedder, "embedder", None)
    return _state(inner) if inner is not None else {}


def _raw_bytes(value: Any) -> bytes:
    if not hasattr(value, "detach"):
        return np.asarray(value).tobytes()
    import torch

    # As bytes, because numpy has no bfloat16.
    raw: bytes = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw
