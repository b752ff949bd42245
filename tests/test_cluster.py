"""On a cluster of its own: `ray job submit`, the token, and what `ray://` says."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import RAY, ray_started

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def cluster():
    with ray_started() as started:
        yield started


def test_a_loop_is_submitted_as_a_job(cluster, tiny_model):
    command = [*RAY, "job", "submit", "--address", cluster.dashboard, "--working-dir", str(REPOSITORY), "--"]
    loop = ["python", "examples/arithmetic_grpo.py", "--address", "auto", "--steps", "1", "--base-model", str(tiny_model)]
    for _ in range(30):  # a head that has just started says so for a while
        done = subprocess.run([*command, *loop], env=cluster.environment, capture_output=True, text=True, timeout=240)
        if "No available agent" not in done.stderr + done.stdout:
            break
        time.sleep(1)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "Held-out accuracy" in done.stdout
    assert "succeeded" in done.stdout


CONNECT = "import raysessions as rs; print([s.name for s in rs.ServiceClient({address!r}).list_sessions()])"


def connect(address: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = CONNECT.format(address=address)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=90)


def test_the_token_lets_in_and_no_token_does_not(cluster):
    assert connect(cluster.address, cluster.environment).stdout.strip() == "[]"
    stranger = {**cluster.environment, "RAY_AUTH_MODE": "disabled"}
    refused = connect(cluster.address, stranger)
    assert refused.returncode != 0
    assert "ClusterUnreachableError" in refused.stderr
    assert "token" in refused.stderr


def test_ray_client_is_refused_with_what_to_do(cluster):
    refused = connect("ray://" + cluster.address, cluster.environment)
    assert "ConfigError" in refused.stderr
    assert "ray job submit" in refused.stderr
