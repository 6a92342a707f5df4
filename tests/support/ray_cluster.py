"""A real Ray of several nodes on the loopback of this machine, each with processes of its own.

    python -m tests.support.ray_cluster <address> <folder> <cpus> <gpus> [head]

is one node, as Ray's own tests begin it: `ray start` refuses a second node on the loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import ClassVar

from rmvdb.app import ray_workers

#: The program of the head that knows the nodes and actors, and that of each node that starts processes.
HEAD, NODE = "gcs_server", "raylet"


class RayCluster:
    """The nodes. The first that is added is the head."""

    #: The environment that nodes and drivers begin with, as where rmvdb starts Ray itself.
    ENVIRONMENT: ClassVar = {**ray_workers.QUIET, **ray_workers.LOOPBACK, "OMP_NUM_THREADS": "1"}

    def __init__(self) -> None:
        # Directly below the system's temporary folder: the path of a socket may not be long.
        self.folder = Path(tempfile.mkdtemp(prefix="rmvdb-ray-", dir="/tmp"))
        self.address = f"127.0.0.1:{_free_port()}"
        self._nodes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for node in reversed(self._nodes):
            for child in _below(node.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            node.kill()
            node.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)  # a killed actor's children may still write there

    def add(self, *, cpus: int = 1, gpus: int = 0, host: str = "") -> int:
        """Start a node and wait until it answers. Return its number. `host` gives it another name than the machine's."""
        role = [] if self._nodes else ["head"]
        words = [sys.executable, "-m", __name__, self.address, str(self.folder), str(cpus), str(gpus), *role]
        other = ["unshare", "-ru", "sh", "-c", f'hostname {host} && exec "$@"', "sh"] if host else []
        with (self.folder / f"start-{len(self._nodes)}.log").open("w") as log:
            process = subprocess.Popen(
                [*other, *words],
                cwd=Path(__file__).parents[2],
                env=os.environ | self.ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )
        self._nodes.append(process)
        end = time.monotonic() + 90
        while "started" not in Path(log.name).read_text():
            assert process.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < end, Path(log.name).read_text()
            time.sleep(0.1)
        return len(self._nodes) - 1

    def kill(self, node: int, *programs: str) -> None:
        """Kill these programs of a node, as the machine's end would."""
        doomed = [pid for pid in _below(self._nodes[node].pid) if _program(pid) in programs]
        assert len(doomed) == len(programs), programs
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)

    def runs(self, node: int, pid: int) -> bool:
        """Tell whether a process is one of this node's."""
        return pid in _below(self._nodes[node].pid)

    def free(self) -> dict[str, float]:
        """Return what Ray has free of each resource."""
        ask = "import json, ray, sys; ray.init(sys.argv[1], logging_level=40); print(json.dumps(ray.available_resources()))"
        words, environment = [sys.executable, "-c", ask, self.address], os.environ | self.ENVIRONMENT
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=90, check=True)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _below(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    with contextlib.suppress(OSError):
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [*children, *(each for child in children for each in _below(child))]
    return []


def _program(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])).name
    return ""


def main(address: str, folder: str, cpus: str, gpus: str, role: str = "") -> None:
    """Be a node until this process is killed."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    head = {"gcs_server_port": int(address.partition(":")[2]), "temp_dir": folder}
    parameters = RayParams(
        **(head if role else {"gcs_address": address}),
        include_dashboard=False,
        node_ip_address="127.0.0.1",
        num_cpus=int(cpus),
        num_gpus=int(gpus),
        object_store_memory=ray_workers.OBJECTS,
        min_worker_port=0,
        max_worker_port=0,
    )
    Node(parameters, head=bool(role), shutdown_at_exit=True, spawn_reaper=False)
    print("started", flush=True)  # noqa: T201
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
