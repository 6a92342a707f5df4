"""pymilvus, loaded when it is first needed; its only importer."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pymilvus import MilvusClient as MilvusClient

#: pymilvus repeats a failed call 75 times by default, in minutes; a session repeats it, and asks for the address again.
ONCE: dict[str, Any] = {"retry_times": 0}


@functools.cache
def pymilvus() -> Any:
    """The module."""
    import pymilvus

    # It logs a traceback for each failed call, also for those that are repeated or expected here.
    for name in ("pymilvus", "pymilvus.milvus_client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
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
