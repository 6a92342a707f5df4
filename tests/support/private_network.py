"""Runs a server in a network of its own and lets it be reached through a Unix socket.

    unshare -rn python private_network.py <socket> <port> <health port> <command> …

The socket appears when the server says that it is healthy. The server ends with this process, and this process with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


def main(path: str, port: str, health: str, *command: str) -> None:
    """Serve until the server ends or SIGTERM comes."""
    parent = os.getppid()
    _die_with_parent()
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    _raise_loopback()
    server = subprocess.Popen(command, preexec_fn=_die_with_parent)
    try:
        asyncio.run(_relay(path, int(port), int(health), server))
    finally:
        # With a collection loaded SIGTERM was never seen to end Milvus 2.3.5, so it gets three seconds.
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(3)
        server.kill()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _raise_loopback() -> None:
    """Do what `ip link set lo up` does: a new network starts with its loopback down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh", b"lo", 0)
        _, flags = struct.unpack("16sh", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        if not flags & _IFF_UP:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | _IFF_UP))


async def _relay(path: str, port: int, health: int, server: subprocess.Popen[bytes]) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    while not await asyncio.to_thread(_healthy, health):
        if server.poll() is not None or stopped.is_set():
            return
        await asyncio.sleep(0.05)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    Path(path).unlink(missing_ok=True)
    async with await asyncio.start_unix_server(connect, path):
        while server.poll() is None and not stopped.is_set():
            await asyncio.sleep(0.1)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(2**18):
            writer.write(data)
            await writer.drain()
    writer.close()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2) as answer:
            return b"OK" in answer.read()
    except OSError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
