"""Upgrade the embedding model behind a running vector search, with no downtime: rank merge and online backfilling.

import rmvdb

client = rmvdb.connect(gallery="photos")
hits = client.search("query.jpg", limit=10)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmvdb import errors

if TYPE_CHECKING:
    from rmvdb.errors import RmvdbError
    from rmvdb.items.pictures import read_image
    from rmvdb.items.torch import TorchEmbedder
    from rmvdb.serving.client import Client
    from rmvdb.types import Hit, Record

__version__ = "0.1.0"
__all__ = ["Client", "Hit", "Record", "RmvdbError", "TorchEmbedder", "connect", "errors", "read_image"]

#: Where each public name lives; loaded when it is asked for, so that `rmvdb --help` does not wait for numpy.
_HOMES = {
    "Client": "rmvdb.serving.client",
    "Hit": "rmvdb.types",
    "Record": "rmvdb.types",
    "RmvdbError": "rmvdb.errors",
    "TorchEmbedder": "rmvdb.items.torch",
    "read_image": "rmvdb.items.pictures",
}


def connect(config: str | Path | None = None, *, gallery: str | None = None, trust: bool = False) -> Client:
    """A client of a gallery (its name may be left out where there is only one).

    `config` is an rmvdb.toml or its folder; without it RMVDB_CONFIG, then the nearest rmvdb.toml upwards of the current folder.
    One that other users may change is refused, unless you `trust` it: it names code that runs here.
    Raises ConfigError, UnknownName, RegistryUnavailable, EngineUnavailable.
    """
    from rmvdb.app import wiring

    opened = wiring.load(Path(config) if config else None, trust=trust)
    return opened.client(gallery, closing=opened.close)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
