"""pymilvus, loaded at its first use. Only this file imports it."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rmvdb.timing import ProcessLock

if TYPE_CHECKING:
    from pymilvus import MilvusClient as MilvusClient

#: By default pymilvus repeats a failed call 75 times, over minutes. A session repeats it instead, and reads the address again.
ONCE: dict[str, Any] = {"retry_times": 0}
#: Seconds within which a server tells its time, or is asked no more.
_TOLD = 2.0

_loading = ProcessLock()


def pymilvus() -> Any:
    """Return the module."""
    with _loading.now:
        return _loaded()


@functools.cache
def _loaded() -> Any:
    with warnings.catch_warnings(action="ignore"):  # they mean nothing to rmvdb's users
        import pymilvus

    # It logs a traceback for each failed call, even for a call that is repeated or expected to fail.
    for name in ("pymilvus", "pymilvus.milvus_client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.suppress(ImportError, AttributeError):  # other versions of pymilvus have no such class
        from pymilvus.client.utils import SciPyHelper

        SciPyHelper.is_scipy_sparse = staticmethod(_only_if_scipy_is_in_use(SciPyHelper.is_scipy_sparse))
    return pymilvus


def _only_if_scipy_is_in_use(ask: Callable[[object], bool]) -> Callable[[object], bool]:
    """Return the same question, which costs nothing in a program that does not use scipy's sparse matrices.

    pymilvus asks it of each value that it sends. At the first one it runs scipy's module beside the import system, which takes
    0.2 s, and may fail if two threads do so at once.
    """

    def is_scipy_sparse(value: object) -> bool:
        if "scipy.sparse" not in sys.modules:
            return False  # nothing can have made one
        with _loading.now:
            return ask(value)

    return is_scipy_sparse


def timestamp(client: MilvusClient) -> int:
    """Return the server's timestamp of now, larger than that of any write that it has answered. Return 0 if the server gives
    none. Milvus 2.3 and newer give one. The client's own method for it is not public: another version of pymilvus may lack it.
    """
    try:
        allocate = client._get_connection().alloc_timestamp
    except AttributeError:
        return 0
    return int(allocate(timeout=_TOLD, **ONCE))


@functools.cache
def foreign_errors() -> tuple[type[BaseException], ...]:
    """Return the errors that a call of pymilvus may raise."""
    import grpc  # type: ignore[import-untyped]

    return (pymilvus().MilvusException, grpc.RpcError)


@functools.cache
def unwritable() -> tuple[type[BaseException], ...]:
    """Return the errors that pymilvus raises, before it sends anything, for rows that do not fit their collection."""
    exceptions = pymilvus().exceptions
    return (exceptions.DataNotMatchException, exceptions.ParamError)
