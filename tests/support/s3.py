"""A server that speaks S3, moto's, in a process of its own on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator

import pytest

from rmvdb.storage.bucket import Bucket

#: Any keys do: moto does not check them.
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hidden-word", "AWS_DEFAULT_REGION": "us-east-1"}


class S3Server:
    """The server. What it holds ends with it."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait()

    @property
    def environment(self) -> dict[str, str]:
        """Where boto3 looks for it."""
        return KEYS | {"AWS_ENDPOINT_URL": self.address}

    def make_bucket(self) -> str:
        """Make an empty bucket and return its name."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        request = urllib.request.Request(f"{self.address}/{name}", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        return name

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        """Let it answer nothing for so long."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _wait(self) -> None:
        end = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{self.address}/moto-api/", timeout=5).close()
                return
            except OSError:
                if time.monotonic() > end or self._process.poll() is not None:
                    raise AssertionError("the S3 server does not start") from None
                time.sleep(0.1)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The session's server."""
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A folder in an empty bucket."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return Bucket(f"s3://{s3_server.make_bucket()}/team/rmvdb", patience=20.0)
