"""`raysessions …` as a user types it, on a cluster of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from clusters import free_port, ray_started
from waiting import wait_for

COMMAND = Path(sys.executable).with_name("raysessions")


def say(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def test_keys_are_made_listed_and_revoked(tmp_path):
    here = {"RAYSESSIONS_OUTPUT_URI": str(tmp_path)}
    made = say("keys", "create", "--tenant", "team-a", "--note", "laptop", **here)
    secret = made.stdout.strip()
    assert secret.startswith("tml-")
    key_id = made.stderr.split()[1]
    listed = say("keys", "list", **here).stdout
    assert listed.split()[:2] == [key_id, "team-a"]
    assert secret not in listed + "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert say("keys", "revoke", key_id, **here).returncode == 0
    assert say("keys", "list", **here).stdout == ""
    wrong = say("keys", "revoke", key_id, **here)
    assert (wrong.returncode, "keys list" in wrong.stderr, "Traceback" in wrong.stderr) == (1, True, False)


def test_wrong_use_is_told(tmp_path):
    for arguments in (["keys", "create", "--tenant", "No Name"], ["serve", "--address", "127.0.0.1:1"], ["fly"]):
        said = say(*arguments)
        assert said.returncode != 0
        assert "Traceback" not in said.stderr
    wrong = tmp_path / "gateway.json"
    wrong.write_text('{"sampling": {"num_replica": 2}}')
    said = say("serve", "--config", str(wrong))
    assert (said.returncode, "num_replica" in said.stderr, "Traceback" in said.stderr) == (1, True, False)
    help = say("serve", "--help").stdout
    assert "--base-model" in help


@pytest.fixture(scope="module")
def cluster():
    with ray_started() as cluster:
        yield cluster


def test_serve_serves_until_it_is_interrupted(cluster, tmp_path):
    port, uri = free_port(), str(tmp_path)
    key = say("keys", "create", "--tenant", "team-a", "--output-uri", uri).stdout.strip()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        taken = say("serve", "--address", cluster.address, "--port", str(port), **cluster.environment)
    assert (taken.returncode, "choose another port" in taken.stderr, "Traceback" in taken.stderr) == (1, True, False)
    arguments = ["serve", "--address", cluster.address, "--port", str(port), "--output-uri", uri]
    serving = subprocess.Popen(
        [COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=cluster.environment
    )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/healthz").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(answers, 90)
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).json()["data"] == []
    finally:
        serving.send_signal(signal.SIGINT)
        output, _ = serving.communicate(timeout=60)
    assert serving.returncode == 0, output
    assert "Traceback" not in output
    assert httpx.get(f"{url}/healthz").status_code == 404
