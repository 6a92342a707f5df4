"""The connection to an engine, with a deadline for every call, and the engine's name and version."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from rmvdb.canonical.limits import EngineLimits
from rmvdb.engines.milvus.driver import ONCE, foreign_errors, pymilvus
from rmvdb.engines.milvus.failures import status_of

if TYPE_CHECKING:
    from rmvdb.engines.milvus.driver import MilvusClient

#: Seconds of one attempt to connect. pymilvus also spends them on the old address before it gives up a broken connection.
_CONNECT = 2.0


class Engine(NamedTuple):
    """The name and version of an engine, and its limits."""

    name: str
    version: str

    @property
    def lite2(self) -> bool:
        return self.name == "milvus-lite" and self.version.startswith("2")

    @property
    def lite3(self) -> bool:
        return self.name == "milvus-lite" and not self.lite2

    @property
    def limits(self) -> EngineLimits:
        """The values that it cannot hold, though a schema allows them."""
        if self.lite2:
            # It deletes, and so upserts, with SQL that it writes itself: a quote in an id would be read as SQL.
            return EngineLimits(engine="Milvus Lite 2.5", not_in_ids="'\0\n\r")
        if self.lite3:
            return EngineLimits(engine="Milvus Lite 3", json=(dict, list))
        if self.name == "milvus" and self.version.startswith("2.3."):
            return EngineLimits(engine="Milvus 2.3", json=(dict, type(None)), json_bytes=65_536)
        return EngineLimits(engine=f"Milvus {self.version}")

    @property
    def partition_keys(self) -> bool:
        """Whether it can write a partition key and filter by it.

        Lite 2.5 accepts a partition key and cannot read a filter any more. An upsert of Milvus 2.3.5 puts records into partitions
        where a filter by the key does not find them (milvus pull request 30772).
        """
        return not self.lite2 and (self.name != "milvus" or self.numbers >= (2, 4))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The first two numbers of the version."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:2])


class Connection:
    """The one client of a store: opened at its first use, and opened again after a failure."""

    def __init__(self, address: Callable[[], str], token: str, timeout: float) -> None:
        self._address = address
        self._token = token
        self.timeout = timeout
        self._lock = threading.Lock()
        self._client: MilvusClient | None = None
        self._engine: Engine | None = None
        #: The address of the last client.
        self.place = "its address"

    def get(self) -> MilvusClient:
        """Return the client; open it if needed."""
        client = self._client
        if client is not None:
            return client
        with self._lock:
            if self._client is None:
                self.place = self._address()
                self._client = _open(self.place, self._token, self.timeout)
                self._engine = None
            return self._client

    def drop(self, client: MilvusClient | None = None) -> None:
        """Close the client; do nothing if another thread has already closed this one."""
        with self._lock:
            if self._client is None or client not in (None, self._client):
                return
            old, self._client = self._client, None
        old.close()

    @property
    def known(self) -> Engine | None:
        """Which engine is at the other end, None if there is no client or it has not been asked."""
        return self._engine if self._client is not None else None

    def engine(self, client: MilvusClient, *, fresh: bool) -> Engine:
        """Return which engine is at the other end; ask it again if the answer must be `fresh`."""
        if self._engine is None or fresh:
            self._engine = _ask_engine(client)
        return self._engine


def _open(place: str, token: str, timeout: float) -> MilvusClient:
    # A deadline for every call of the channel. pymilvus' own timeout would also make it repeat failures for that long.
    deadline = json.dumps({"methodConfig": [{"name": [{}], "timeout": f"{timeout:.3f}s"}]})
    options: dict[str, Any] = {"grpc.service_config": deadline}
    if place.startswith("unix:"):
        # pymilvus pings every 10 s. A Milvus server allows that. Milvus Lite ends the connection ("too_many_pings") after a
        # minute and a half without a call. A socket of this machine needs no pings: no firewall forgets it.
        options["grpc.keepalive_time_ms"] = 2**31 - 1
    opened: MilvusClient = pymilvus().MilvusClient(
        uri=place, token=token, timeout=min(timeout, _CONNECT), dedicated=True, grpc_options=options
    )
    return opened


def _ask_engine(client: MilvusClient) -> Engine:
    try:
        found = str(client.get_server_version(**ONCE))
    except foreign_errors() as exc:
        if status_of(exc) != "UNIMPLEMENTED":
            raise
        # Only Lite 2 cannot say its version; its process serves the package that is installed here.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version("milvus-lite")
            return Engine("milvus-lite", version if version.startswith("2.") else "2")
        return Engine("milvus-lite", "2")
    name = "milvus-lite" if "milvus_lite" in found else "milvus"
    number = re.search(r"\d[\w.]*", found.replace("milvus_lite", ""))
    return Engine(name, number[0] if number else found)
