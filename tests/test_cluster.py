"""On a cluster of its own: `ray job submit`, the token, TLS, and what `ray://` says."""

from __future__ import annotations

import datetime
import ipaddress
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import RAY, StartedCluster, node_ip, ray_started
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

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


CONNECT = """
import raysessions as rs
print([session.name for session in rs.ServiceClient({address!r}).list_sessions()])
"""
TRAIN_OVER_TLS = """
import raysessions as rs
with rs.ServiceClient({address!r}, network=rs.NetworkConfig(require_tls=True)) as service:
    training = service.create_lora_training_client({model!r}, rank=4)
    print(training.forward_backward([rs.datum_for_supervised([5, 6, 7], [1.0] * 3)]).result().loss > 0)
"""


def run_code(code: str, environment: dict[str, str], **names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code.format(**names)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def connect(address: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run_code(CONNECT, environment, address=address)


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


@pytest.fixture(scope="module")
def tls_environment(tmp_path_factory) -> dict[str, str]:
    """Ray's variables for TLS between all processes of this machine, with certificates made for it."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "raysessions tests")])
    now = datetime.datetime.now(datetime.UTC)
    local = [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", node_ip())]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(local), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "tls.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "tls.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(folder / "tls.crt"),
        "RAY_TLS_SERVER_KEY": str(folder / "tls.key"),
        "RAY_TLS_CA_CERT": str(folder / "tls.crt"),
    }


def test_a_session_trains_over_tls_and_a_cluster_without_it_is_refused(cluster, tls_environment, tiny_model):
    def train(on: StartedCluster, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return run_code(TRAIN_OVER_TLS, environment, address=on.address, model=str(tiny_model))

    with ray_started(**tls_environment) as secured:
        trained = train(secured, secured.environment)
        assert trained.stdout.splitlines()[-1:] == ["True"], trained.stderr[-3000:]
        plain = {name: value for name, value in secured.environment.items() if name not in tls_environment}
        assert "ClusterUnreachableError" in train(secured, plain).stderr
    assert "require_tls" in train(cluster, cluster.environment).stderr
