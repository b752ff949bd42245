"""The part of ServiceClient that serves saved versions over HTTP, with OpenAI's API, by Ray Serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from raysessions.config import SamplingConfig
from raysessions.errors import ConfigError, PlacementError
from raysessions.responses import CheckpointInfo
from raysessions.settings import Settings
from raysessions.storage_location import StoredUri
from raysessions.uris import SCHEME, VersionUri, check_name

LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class DeploymentInfo:
    """One deployed version."""

    name: str
    path: str
    """Of the version."""
    url: str
    """`base_url` for OpenAI's clients; the model is `name`."""
    status: str
    """Ray Serve's word: DEPLOYING, RUNNING, UNHEALTHY, DEPLOY_FAILED, DELETING."""
    num_replicas: int
    """That run."""
    message: str
    """Ray Serve's, if something is wrong."""


class Deployments:
    """They belong to the cluster: neither a session's end nor this client's ends them."""

    _settings: Settings
    get_checkpoint: Callable[[str], CheckpointInfo]
    """CheckpointCatalogue's."""

    def deploy(
        self,
        path: str,
        name: str,
        num_replicas: int | None = None,
        *,
        autoscaling: Mapping[str, Any] | None = None,
        sampling: SamplingConfig | None = None,
        max_body_bytes: int = 64 * 2**20,
        requests_per_minute: int = 30_000,
        host: str = "127.0.0.1",
        port: int = 8000,
        timeout_s: float = 900,
    ) -> DeploymentInfo:
        """Serves a version on engines of its own, and blocks until they answer. One of the same name is replaced, without a
        gap.

        Args:
            path: a version that `save_weights_for_sampler` made. With `merge_weights` it is served as one model, the fastest
                way; otherwise as an adapter on its base model.
            name: in the URL, and the model's name for OpenAI's clients.
            num_replicas: None: 1, or as `autoscaling` says.
            autoscaling: Ray Serve's AutoscalingConfig, such as `{"min_replicas": 1, "max_replicas": 4,
                "target_ongoing_requests": 32}`.
            sampling: of each replica; its `num_replicas` has no meaning here. None: this client's.
            max_body_bytes: of a request.
            requests_per_minute: of one API key, on one replica.
            host, port: where Ray Serve listens, if it is not running yet.
            timeout_s: when it passes, the deployment is taken back.

        Keys of this client's tenant may ask (`raysessions keys create`). Raises `CheckpointNotFoundError`, `PlacementError`.
        """
        serving = _serving()
        from raysessions.gateway.deployment import DeploymentSpec

        if num_replicas is not None and autoscaling is not None:
            raise ConfigError("Give num_replicas or autoscaling, not both.")
        if num_replicas is not None and num_replicas < 1:
            raise ConfigError(f"num_replicas is {num_replicas}: give at least 1, or undeploy it.")
        check_name(name, "Deployment name")
        uri = VersionUri.parse(path)
        info = self.get_checkpoint(path)
        if info.kind == "state":
            raise ConfigError(f"{path} is a training state: deploy a version that save_weights_for_sampler made.")
        config = self._settings.network.place(sampling or self._settings.sampling)
        spec = DeploymentSpec(
            name=name,
            uri=StoredUri(uri, self._settings.location),
            tenant=self._settings.tenant,
            sampling=config.for_rank(info.rank),
            max_body_bytes=max_body_bytes,
            requests_per_minute=requests_per_minute,
        )
        replicas = num_replicas or (1 if autoscaling is None else None)
        serving.deploy(spec, replicas, autoscaling, host, port)
        return self._deployed(serving, name, timeout_s)

    def undeploy(self, name: str) -> None:
        """Requests under way are answered first. Safe to call again."""
        serving = _serving()
        if serving.status_of(name) is not None:
            serving.undeploy(name)

    def list_deployments(self) -> list[DeploymentInfo]:
        """Of the cluster, by name."""
        serving = _serving()
        return [_info(serving, name) for name in sorted(serving.deployed())]

    def _deployed(self, serving: ModuleType, name: str, timeout_s: float) -> DeploymentInfo:
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                info = _info(serving, name)
                if info.status == "RUNNING":
                    return info
                if info.status == "DEPLOY_FAILED":
                    raise PlacementError(f"Deployment {name} failed: {info.message}")
                if time.monotonic() > deadline:
                    raise PlacementError(
                        f"Deployment {name} did not answer within {timeout_s:g} s. {info.message} Lower actor_options or "
                        "num_replicas, stop sessions, or add a node."
                    )
                time.sleep(LOOK_EVERY_S)
        except BaseException:
            serving.undeploy(name)
            raise


def _info(serving: ModuleType, name: str) -> DeploymentInfo:
    status = serving.status_of(name)
    url = f"{serving.root_url()}{serving.route_of(name)}/v1"
    ((version, deployment),) = status.deployments.items() or (("", None),)
    running = 0 if deployment is None else deployment.replica_states.get("RUNNING", 0)
    message = " ".join(filter(None, (status.message, "" if deployment is None else deployment.message)))
    return DeploymentInfo(name, f"{SCHEME}{version.replace('.', '/')}", url, str(status.status.value), running, message)


def _serving() -> ModuleType:
    try:
        from raysessions.gateway import serving
    except ImportError as error:
        raise ConfigError(f"Deployments need Ray Serve: pip install 'raysessions[gateway]' on every node. ({error})") from error
    return serving
