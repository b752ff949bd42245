"""On a cluster of its own: the token, and what `ray://` says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from clusters import ray_started


@pytest.fixture(scope="module")
def cluster():
    with ray_started() as started:
        yield started


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
