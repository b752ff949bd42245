"""Ray Serve applications: the gateway, and deployed versions."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatusOverview

from raysessions.actors.placement import engine_options
from raysessions.errors import ConfigError
from raysessions.gateway.app import build_app
from raysessions.gateway.config import GatewayConfig
from raysessions.gateway.deployment import DeploymentSpec, ModelServer

GATEWAY = "raysessions"
MAX_REQUESTS = 10_000
"""Of the gateway, at the same time: futures that are waited for are requests too."""
REQUESTS_PER_SEQUENCE = 2
"""That a deployed version's replica takes, for each sequence that it decodes at the same time."""
DRAIN_S = 30
"""How long requests under way may take when a replica ends."""


class Gateway:
    """One replica."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self._config)


def start(config: GatewayConfig, host: str, port: int) -> str:
    """Returns its address when it answers. Starting it again replaces it. Where Ray Serve runs already, it stays."""
    _start_serve(host, port)
    deployment = serve.deployment(
        num_replicas=1,  # futures are remembered in one place
        max_ongoing_requests=MAX_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=DRAIN_S,
    )(serve.ingress()(Gateway))
    serve.run(deployment.bind(config), name=GATEWAY, route_prefix="/")
    return root_url()


def stop() -> None:
    """Requests under way are answered first. Safe to call again."""
    if GATEWAY in serve.status().applications:
        serve.delete(GATEWAY)


def deploy(
    spec: DeploymentSpec,
    num_replicas: int | None,
    autoscaling: Mapping[str, Any] | None,
    host: str,
    port: int,
) -> None:
    """Begins it, and replaces one of the same name. Wait for its status."""
    _start_serve(host, port)
    deployment = serve.deployment(
        name=f"{spec.uri.uri.group}.v{spec.uri.uri.version}",  # by which list_deployments knows the version
        num_replicas=num_replicas,
        autoscaling_config=None if autoscaling is None else dict(autoscaling),
        max_ongoing_requests=REQUESTS_PER_SEQUENCE * spec.sampling.max_num_seqs,
        max_queued_requests=spec.sampling.max_queued_requests,
        ray_actor_options=engine_options(spec.sampling),
        graceful_shutdown_timeout_s=DRAIN_S,
        health_check_timeout_s=2 * DRAIN_S,
    )(serve.ingress()(ModelServer))
    serve._run(deployment.bind(spec), _blocking=False, name=application_of(spec.name), route_prefix=route_of(spec.name))


def undeploy(name: str) -> None:
    serve.delete(application_of(name))


def status_of(name: str) -> ApplicationStatusOverview | None:
    """None if there is no such application."""
    return serve.status().applications.get(application_of(name))


def deployed() -> list[str]:
    """Names of deployments, those too that begin or fail."""
    names = serve.status().applications
    return [name.removeprefix(f"{GATEWAY}-") for name in names if name.startswith(f"{GATEWAY}-")]


def root_url() -> str:
    """Where Ray Serve listens."""
    client = _get_global_client()
    assert client is not None
    return client.root_url


def route_of(name: str) -> str:
    return f"/deployments/{name}"


def _start_serve(host: str, port: int) -> None:
    if _get_global_client(raise_if_no_controller_running=False) is None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ConfigError(f"Ray Serve cannot listen at {host}:{port} ({error}): choose another port.") from error
    serve.start(http_options={"host": host, "port": port})


def application_of(name: str) -> str:
    return f"{GATEWAY}-{name}"
