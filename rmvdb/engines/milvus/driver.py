"""pymilvus, loaded when it is first needed; its only importer."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pymilvus import MilvusClient as MilvusClient

#: pymilvus repeats a failed call 75 times by default, in minutes; a session repeats it, and asks for the address again.
ONCE: dict[str, Any] = {"retry_times": 0}


_loading = threading.Lock()


def pymilvus() -> Any:
    """The module."""
    with _loading:
        return _loaded()


@functools.cache
def _loaded() -> Any:
    with warnings.catch_warnings(action="ignore"):  # which say nothing to rmvdb's users
        import pymilvus

    # It logs a traceback for each failed call, also for those that are repeated or expected here.
    for name in ("pymilvus", "pymilvus.milvus_client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # At its first vectors it runs scipy's module once more, beside the import system: of two threads that do so one may fail.
    with contextlib.suppress(ImportError, AttributeError):  # a pymilvus that does not
        from pymilvus.client.utils import SciPyHelper

        SciPyHelper.is_scipy_sparse(None)
    return pymilvus


@functools.cache
def foreign_errors() -> tuple[type[BaseException], ...]:
    """What a call of pymilvus may raise."""
    import grpc  # type: ignore[import-untyped]

    return (pymilvus().MilvusException, grpc.RpcError)


@functools.cache
def unwritable() -> tuple[type[BaseException], ...]:
    """What pymilvus raises for rows that do not fit their collection, before it sends any."""
    exceptions = pymilvus().exceptions
    return (exceptions.DataNotMatchException, exceptions.ParamError)
