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
            "--node-ip-address=127.0.0.1",
        ]  # fmt: skip
        started = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert started.stdout is not None
            said = []
            for line in started.stdout:
                said.append(line)
                if "--block" in line or "To terminate" in line:
                    break
            assert started.poll() is None, "".join(said)
            yield StartedCluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", env)
        finally:
            processes = [*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(processes, timeout=20)
            started.wait()
