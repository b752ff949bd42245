"""The way to a Ray cluster: the one at hand, the one named, or a local one."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import warnings
from pathlib import Path

import ray

from raysessions.errors import ClusterUnreachableError, ConfigError
from raysessions.network import uses_tls

PROBE_TIMEOUT_S = 3.0
CURRENT_CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` leaves the address of this machine's cluster."""


_is_local = False


def connect(address: str | None) -> None:
    """Connects this process, unless it is connected already.

    None: `RAY_ADDRESS` if set, else a local Ray that ends with this process. Raises `ClusterUnreachableError` within
    seconds when nothing answers; Ray by itself would try for minutes.
    """
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        _start_local()
        return
    if address.startswith("ray://"):
        _probe(address)
        raise ConfigError(
            f"{address}: sessions do not run over Ray Client, whose futures live in another process. Send the script into the "
            "cluster (`ray job submit --working-dir . -- python loop.py --address auto`), or run it on one of its nodes with "
            "address='auto' or HOST:6379."
        )
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _current_cluster()  # the variable is Ray's word to a job
    _probe(address)
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ClusterUnreachableError(
            f"The Ray cluster at {address} answers but does not let this process in: {error}. Its token must be in "
            "~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH here too (RAY_AUTH_MODE=token), with TLS certificates."
        ) from error


def is_local() -> bool:
    """Whether this process's Ray was started for it, and ends with it."""
    return _is_local and ray.is_initialized()


def warn_of_unshared_storage(output_uri: str | None) -> None:
    """Several nodes, and versions in a folder that each has for itself: what one node saves, another would not find."""
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    if output_uri is None and num_nodes > 1:
        warnings.warn(
            f"The cluster has {num_nodes} nodes, and saved versions go to the home folder of whichever node writes them. Give "
            "output_uri: a folder that all nodes share, or s3://, gs://, hdfs://.",
            stacklevel=3,
        )


def _start_local() -> None:
    global _is_local
    _is_local = True
    # A trainer and a sampler take one logical CPU each, on a machine with one core too.
    num_cpus = max(2, len(os.sched_getaffinity(0)))
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)


def _current_cluster() -> str:
    try:
        return CURRENT_CLUSTER_FILE.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise ClusterUnreachableError(
            "address='auto', but no Ray cluster was started on this machine. Run `ray start --head`, name an address, "
            "or leave the address out for a local Ray."
        ) from None


def _probe(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ClusterUnreachableError(f"{address!r} is not an address: expected HOST:PORT, ray://HOST:PORT or 'auto'.")
    try:
        with socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S) as connection:
            speaks_tls = _speaks_tls(connection)
    except OSError as error:
        raise ClusterUnreachableError(
            f"No Ray cluster answers at {address} ({error}). Check that it runs (`ray status` on its head node), that "
            "this machine reaches the port, and RAY_ADDRESS; unset it for a local Ray."
        ) from error
    if speaks_tls != uses_tls():
        other = "speaks TLS, and this process does not" if speaks_tls else "does not speak TLS, and this process does"
        raise ClusterUnreachableError(
            f"The Ray cluster at {address} {other}: set RAY_USE_TLS, "
            "RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT here as on its nodes."
        )


def _speaks_tls(connection: socket.socket) -> bool:
    """Whether a server greets back in TLS; Ray itself would try for minutes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(connection).close()
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it wants to see a certificate first
    except OSError:
        return False
    return True
