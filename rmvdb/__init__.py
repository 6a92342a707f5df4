"""Upgrade the embedding model behind a running vector search, with no downtime: rank merge and online backfilling.

import rmvdb

client = rmvdb.connect(gallery="photos")
hits = client.search(Path("query.jpg"), limit=10)  # a str is a text
"""

from __future__ import annotations

import errno
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

#: The module of each public name. Python imports it on first use, so that `rmvdb --help` does not wait for numpy.
_HOMES = {
    "Client": "rmvdb.serving.client",
    "Hit": "rmvdb.types",
    "Record": "rmvdb.types",
    "RmvdbError": "rmvdb.errors",
    "TorchEmbedder": "rmvdb.items.torch",
    "read_image": "rmvdb.items.pictures",
}


def connect(config: str | Path | None = None, *, gallery: str | None = None, trust: bool = False) -> Client:
    """Connect to a gallery. If there is only one, you may leave out its name.

    `config` is an rmvdb.toml or its folder. The default is RMVDB_CONFIG, then the nearest rmvdb.toml in the current folder or
    above it. rmvdb refuses a file that other users may change, because it names code that runs here, unless you `trust` it.

    Raises:
        ConfigError: a setting is wrong.
        UnknownName: there is no such gallery.
        RegistryUnavailable: the database cannot be reached.
        EngineUnavailable: the vector engine cannot be reached.
    """
    for name, value, kind in (("config", config, (str, Path)), ("gallery", gallery, (str,))):
        if value is not None and not isinstance(value, kind):
            raise errors.UsageError(f"{name} is a text{' or a Path' if Path in kind else ''}, not {value!r:.80}")
    from rmvdb.app import wiring

    opened = wiring.load(Path(config) if config else None, trust=trust)
    try:
        return opened.client(gallery, closing=opened.close)
    except OSError as exc:
        opened.close()
        if exc.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise errors.EngineUnavailable(
            "This process has no free file descriptor to connect; close what it has open, or raise its limit (ulimit -n)"
        ) from exc
    except BaseException:
        opened.close()
        raise


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
