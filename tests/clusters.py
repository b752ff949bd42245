"""A Ray cluster of its own, beside the one of the tests."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from waiting import wait_for

STARTED_WITHIN_S = 60
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@dataclass(frozen=True)
class StartedCluster:
    """What `ray start --head` said."""

    address: str
    dashboard: str
    environment: dict[str, str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def node_ip() -> str:
    """The address by which Ray's processes on this machine know each other."""
    return ray.util.get_node_ip_address()


@contextlib.contextmanager
def ray_started(num_cpus: int = 4, **environment: str) -> Iterator[StartedCluster]:
    """`ray start --head` with this virtual environment's python first; all its processes end afterwards."""
    port, dashboard = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="rs-ray-", dir="/tmp") as folder:
        token = Path(folder) / "token"
        token.write_text(secrets.token_hex(32))
        env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            **environment,
        }
        env.pop("RAY_ADDRESS", None)
        command = [
            *RAY, "start", "--head", "--block", f"--port={port}", f"--num-cpus={num_cpus}", f"--temp-dir={folder}",
            f"--dashboard-port={dashboard}", "--include-dashboard=true", "--disable-usage-stats",
            # Its default is one port for all of a machine's nodes, and a job agent that finds it taken takes no jobs.
            f"--dashboard-agent-listen-port={free_port()}",
        ]  # fmt: skip
        said = Path(folder) / "said"
        with said.open("w") as output:
            started = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: "--block" in said.read_text() or started.poll() is not None, STARTED_WITHIN_S)
            assert started.poll() is None, said.read_text()
            yield StartedCluster(f"{node_ip()}:{port}", f"http://127.0.0.1:{dashboard}", env)
        finally:
            processes = [*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(processes, timeout=20)
            started.wait()
