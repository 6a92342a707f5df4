"""Plain searches of whatever is served, by pymilvus alone: while these fail or are slow, so may rmvdb's.

python -m tests.stress.probe FOLDER
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from pymilvus import MilvusClient
from sqlalchemy import create_engine, text

import rmvdb.app
from rmvdb.engines import lite

#: Seconds that one call may take, as in the project's rmvdb.toml.
TIMEOUT = 3.0
DIMS = {"a": 16, "b": 20}
#: The facts that `rmvdb.Client` knows before it searches.
SERVED = text("SELECT legs FROM serving_plans p JOIN galleries g ON g.id = p.gallery_id AND g.epoch = p.epoch")


class Probe:
    """Asks the database what is served, and then the engine, and writes down when it asked, and when and what it was answered."""

    def __init__(self, folder: Path) -> None:
        settings = rmvdb.app.load(folder).settings
        self._uri = settings.milvus.uri
        self._registry = create_engine(settings.registry.url.get_secret_value())
        self._client: MilvusClient | None = None
        self._log = (folder / f"probe-{os.getpid()}.jsonl").open("a", buffering=1)

    def run(self) -> None:
        """Until it is killed."""
        while True:
            asked = time.monotonic()
            failed = self._failed()
            self._log.write(json.dumps({"asked": asked, "answered": time.monotonic(), "failed": failed}) + "\n")
            time.sleep(0.2)

    def _failed(self) -> str:
        """Return the error that the database or the engine answered, "" if there was none."""
        try:
            served = self._served()
            try:
                self._search(served)
            except Exception:
                self._client = None
                if served == self._served():  # or else it was dropped meanwhile
                    raise
        except Exception as exc:  # noqa: BLE001 (whatever it is, it is written down)
            return f"{type(exc).__name__}: {str(exc)[:200]}"
        return ""

    def _served(self) -> list[dict[str, Any]]:
        with self._registry.connect() as connection:
            legs = connection.execute(SERVED).scalar_one()
        legs = json.loads(legs) if isinstance(legs, str) else legs
        return [leg for leg in legs if leg["searched"]]

    def _search(self, legs: list[dict[str, Any]]) -> None:
        if self._client is None:
            uri = lite.address(self._uri) if self._uri.endswith(".db") else self._uri
            self._client = MilvusClient(uri=uri, timeout=TIMEOUT, dedicated=True)
        for leg in legs:
            vector = [1.0] * DIMS[leg["model"].partition("+")[0]]
            self._client.search(leg["collection"], data=[vector], limit=1, timeout=TIMEOUT, retry_times=0)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # pymilvus logs a traceback for each failed call
    Probe(Path(sys.argv[1])).run()
