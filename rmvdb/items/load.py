"""Embedders and classifiers by the `package.module:object` that a model version names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rmvdb.errors import ModelError
from rmvdb.items.check import reason_of
from rmvdb.items.objects import Allowed, load_object
from rmvdb.protocols import Classifier, Embedder


def load_embedder(spec: str, options: Mapping[str, Any] | None = None, *, allowed: Allowed | None = None) -> Embedder:
    """Load the embedder that the spec names: an object with `embed`, or a class or function that makes one from `options`.

    Raises: ModelError if that fails, UsageError if the spec is malformed, ConfigError if its module is not `allowed`.
    """
    named = load_object(spec, error=ModelError, allowed=allowed)
    ready = _is_ready(named)
    if ready and options:
        raise ModelError(f"{spec!r} is an object and takes no options; remove {', '.join(options)}")
    made: Any = named if ready else _make(spec, named, dict(options or {}))
    if not callable(getattr(made, "embed", None)):
        way = _way_to_embed(spec, made, ready=ready) + _way_to_wrap(spec, named)
        raise ModelError(f"{spec!r} gives a {type(made).__name__} without embed(items); {way}")
    embedder: Embedder = made
    return embedder


def load_classifier(spec: str, *, allowed: Allowed | None = None) -> Classifier:
    """Load the classifier that the spec names: an object with `scores`, or a class or function that makes one.

    Raises: ModelError if that fails, UsageError if the spec is malformed, ConfigError if its module is not `allowed`.
    """
    named = load_object(spec, error=ModelError, allowed=allowed)
    made: Any = named if hasattr(named, "scores") and not inspect.isclass(named) else _make(spec, named, {})
    if not hasattr(made, "scores"):
        raise ModelError(f"{spec!r} has no scores(vectors); give it one that returns (n, classes) probabilities")
    classifier: Classifier = made
    return classifier


def _is_ready(named: object) -> bool:
    return not inspect.isclass(named) and (hasattr(named, "embed") or not callable(named) or hasattr(named, "state_dict"))


def _make(spec: str, factory: Any, options: dict[str, Any]) -> object:
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as exc:
        raise ModelError(
            f"{spec!r} cannot be made with options {list(options)}: {exc}; correct the options{_way_to_wrap(spec, factory)}"
        ) from exc
    except ValueError:
        pass  # a few classes written in C have no signature, so the call itself tells
    try:
        made: object = factory(**options)
    except (Exception, SystemExit) as exc:
        raise ModelError(f"{spec!r} fails to load: {reason_of(exc)}; fix it and try again{_way_to_wrap(spec, factory)}") from exc
    return made


def _way_to_embed(spec: str, made: object, *, ready: bool) -> str:
    """Say how to make an embedder of an object that a spec gives: a line of Python, if there is one that works."""
    if callable(getattr(made, "encode", None)):  # as SentenceTransformer has
        name = spec.rpartition(":")[2]
        return _add(spec, f"class Embedder: model = {name if ready else f'{name}()'}; embed = model.encode")
    if hasattr(made, "state_dict"):
        return "wrap it: TorchEmbedder(module, preprocess)"
    return "give it a method embed(items) that returns (n, dim) float32"


def _way_to_wrap(spec: str, factory: object) -> str:
    """Say how to make an embedder of a function that may be the model itself."""
    if not inspect.isfunction(factory) or not inspect.signature(factory).parameters:
        return ""
    line = f"class Embedder: embed = staticmethod({spec.rpartition(':')[2]})"
    return f". If the function takes items and returns their vectors, {_add(spec, line)}"


def _add(spec: str, line: str) -> str:
    module = spec.partition(":")[0]
    return f"add the line `{line}` to the end of {module.rpartition('.')[2]}.py and name {module}:Embedder"
