"""The real Milvus 2.3.5 standalone server that the PyPI wheel `milvus` carries, for tests.

    with MilvusServer(folder) as server:
        store = MilvusStore(lambda: server.address)

The wheel's own starter unpacks 246 MB per data folder and cannot run two servers; this one unpacks once and gives the embedded
etcd its own ports. Milvus listens on every interface, so it runs in a network namespace that has nothing but its loopback, and is
reached through a Unix socket (private_network.py). Where the tests themselves run in such a namespace, as under
`unshare -rn sh -c 'ip link set lo up; exec pytest'`, it is reached directly, which is what a benchmark wants.
"""

from __future__ import annotations

import importlib.util
import json
import lzma
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PORTS = [f"{role}_port" for role in ("etcd", "root_coord", "proxy", "proxy_internal", "query_coord", "query_node")]
PORTS += [*(f"{role}_port" for role in ("index_coord", "index_node", "data_coord", "data_node")), "metrics"]

#: A strong search waits for the next tick: 60 ms, not 200. With a tick of 20 ms a server that does nothing took a sixth of a core
#: beside four collections, with this one half of that. Checked each second, a new collection is loaded a second later. A killed
#: node is given up in 5 s.
SETTINGS = {
    "proxy.timeTickInterval": 50,
    "queryCoord.checkChannelInterval": 250,
    "queryCoord.checkSegmentInterval": 250,
    "queryCoord.distPullInterval": 200,
    "common.session.ttl": 5,
}


def unavailable() -> str:
    """Return why no server can run here, "" if one can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the Milvus server of the tests is a program for x86-64 Linux"
    if importlib.util.find_spec("milvus") is None:
        return "the Milvus server of the tests is not installed: pip install milvus==2.3.5"
    if not (_isolated() or _unshare()):
        return "Milvus listens on every interface, and the kernel allows no network of its own to keep it in"
    return ""


class MilvusServer:
    """One standalone server on one data folder; the same folder gives the same data after a restart."""

    def __init__(self, folder: Path, *, settings: Mapping[str, object] | None = None) -> None:
        self.folder = folder.absolute()
        self._wheel = Path(str(importlib.util.find_spec("milvus").origin)).parent / "data"  # type: ignore[union-attr]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._binaries = _unpacked(self._wheel / "bin", cache / "rmvdb-tests" / "milvus-2.3.5")
        self._settings = SETTINGS | dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        # Directly below the system's temporary folder: the path of a socket may not be long.
        self._socket = Path(tempfile.mkdtemp(prefix="rmvdb-milvus-")) / "sock"
        self._ports: dict[str, int] = {}

    def __enter__(self) -> MilvusServer:
        try:
            self.start()
        except BaseException:
            self.stop(kill=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._socket.parent.rmdir()

    @property
    def address(self) -> str:
        """The address that MilvusStore and MilvusClient connect to."""
        return f"http://127.0.0.1:{self._ports['proxy_port']}" if _isolated() else f"unix:{self._socket}"

    def start(self, *, timeout: float = 120.0) -> None:
        """Start it and wait until it answers."""
        self._write_config()
        private = [] if _isolated() else ["unshare", "-rn"]
        relay = [sys.executable, str(Path(__file__).with_name("private_network.py")), str(self._socket)]
        ports = [str(self._ports["proxy_port"]), str(self._ports["metrics"])]
        environment = {
            "DEPLOY_MODE": "STANDALONE",
            "METRICS_PORT": str(self._ports["metrics"]),
            "LD_LIBRARY_PATH": str(self._binaries),
        }
        with (self.folder / "logs" / "stdout.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*private, *relay, *ports, str(self._binaries / "milvus"), "run", "standalone"],
                cwd=self.folder,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout
        while not _answers(self._socket):
            if self._process.poll() is not None:
                raise RuntimeError(f"Milvus exited with {self._process.returncode}: see {self.folder}/logs/stdout.log")
            if time.monotonic() > deadline:
                raise TimeoutError(f"Milvus was not healthy after {timeout} s: see {self.folder}/logs/stdout.log")
            time.sleep(0.05)

    def stop(self, *, kill: bool = False) -> None:
        """End it, or with `kill` as a power cut would."""
        if self._process is None:
            return
        # The relay takes the server with it: SIGTERM is passed on with three seconds to obey, SIGKILL kills it at once.
        self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=30)
        self._process = None
        self._socket.unlink(missing_ok=True)

    def processes(self) -> list[int]:
        """Return the pids of the server, without the process that relays its calls."""
        if self._process is None:
            return []
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def _write_config(self) -> None:
        for name in ("configs", "logs", "data"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        saved = self.folder / "ports.json"
        self._ports = json.loads(saved.read_text()) if saved.exists() else dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        saved.write_text(json.dumps(self._ports))
        etcd_data = self.folder / "data" / "etcd.data"
        values: dict[str, Any] = self._ports | {
            "etcd_log_path": self.folder / "logs" / "etcd.log",
            "system_log_path": self.folder / "logs",
            "etcd_data_dir": etcd_data,
            "local_storage_dir": self.folder / "data",
            "rocksmq_data_dir": self.folder / "data" / "rocksmq",
        }
        template = (self._wheel / "config.yaml.template").read_text()
        config = re.sub(r"\{\{(.*?)\}\}", lambda match: _filled(match[1], values), template)
        peer, client = self._ports["index_coord_port"], self._ports["etcd_port"]
        (self.folder / "configs" / "etcd.yaml").write_text(
            f"name: default\nlisten-client-urls: http://127.0.0.1:{client}\nadvertise-client-urls: http://127.0.0.1:{client}\n"
            f"listen-peer-urls: http://127.0.0.1:{peer}\ninitial-advertise-peer-urls: http://127.0.0.1:{peer}\n"
            f"initial-cluster: default=http://127.0.0.1:{peer}\n"
        )
        config = config.replace(
            f"  data:\n    dir: {etcd_data}",
            f"  config:\n    path: {self.folder}/configs/etcd.yaml\n  data:\n    dir: {etcd_data}",
        )
        (self.folder / "configs" / "milvus.yaml").write_text(_overridden(config, self._settings))
        (self.folder / "configs" / "glog.conf").write_bytes((self._wheel / "glog.conf").read_bytes())


def _isolated() -> bool:
    """Return whether this process has no network but the loopback."""
    return {path.name for path in Path("/sys/class/net").iterdir()} <= {"lo"}


def _unshare() -> bool:
    try:
        return subprocess.run(["unshare", "-rn", "true"], check=False, stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        return False


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _unpacked(source: Path, target: Path) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    for packed in source.glob("*.lzma"):
        binary = target / packed.stem
        if not binary.exists():
            part = binary.with_name(f"{binary.name}.{os.getpid()}")
            with lzma.open(packed) as content:
                part.write_bytes(content.read())
            part.chmod(0o755)
            part.rename(binary)
    return target


def _filled(slot: str, values: Mapping[str, Any]) -> str:
    key, _, default = slot.partition(":")
    return str(values.get(key.split("(")[0].strip(), default.strip()))


def _overridden(config: str, settings: Mapping[str, object]) -> str:
    """Set dotted keys such as "proxy.timeTickInterval" in two-space indented YAML; a key that is missing comes first there."""
    path: list[str] = []
    lines: dict[str, list[str]] = {"": []}
    for line in config.splitlines():
        if match := re.match(r"^( *)([A-Za-z0-9_]+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
        lines.setdefault(".".join(path), []).append(line)
    for key, value in settings.items():
        parent, _, name = key.rpartition(".")
        indent = "  " * key.count(".")
        if key in lines:
            lines[key][0] = f"{indent}{name}: {value}"
        else:
            lines[parent].insert(1, f"{indent}{name}: {value}")
    return "\n".join(line for each in lines.values() for line in each) + "\n"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
