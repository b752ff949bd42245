"""The gateway as a Ray Serve application."""

from __future__ import annotations

from fastapi import FastAPI
from ray import serve

from raysessions.gateway.app import build_app
from raysessions.gateway.config import GatewayConfig

NAME = "raysessions"
MAX_REQUESTS = 10_000
"""At the same time: futures that are waited for are requests too."""


class Gateway:
    """One replica."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self._config)


def start(config: GatewayConfig, host: str, port: int) -> None:
    """Returns when it answers. The cluster is connected to already. Starting it again replaces it."""
    serve.start(http_options={"host": host, "port": port})
    deployment = serve.deployment(
        num_replicas=1,  # the order of a session's operations is known in one place
        max_ongoing_requests=MAX_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=30,
    )(serve.ingress()(Gateway))
    serve.run(deployment.bind(config), name=NAME, route_prefix="/")


def stop() -> None:
    """Requests under way are answered first."""
    serve.delete(NAME)
