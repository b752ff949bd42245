"""What the cluster must offer, and where in it actors may be placed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

from pydantic import Field

from raysessions.config import ActorConfig
from raysessions.errors import ConfigError
from raysessions.types import TypedModel

C = TypeVar("C", bound=ActorConfig)


def uses_tls() -> bool:
    """Whether this process talks to Ray over TLS."""
    return os.environ.get("RAY_USE_TLS", "0") in ("1", "true")


class NetworkConfig(TypedModel):
    """Refused with a sentence when the cluster does not offer it."""

    require_tls: bool = False
    """Ray's own traffic must be encrypted (`RAY_USE_TLS=1` and certificates on every node and for this process)."""
    require_token_auth: bool = False
    """Only who has the cluster's token may connect (Ray's default since 2.60)."""
    node_labels: Mapping[str, str] = Field(default_factory=dict)
    """Ray's node labels (`ray start --labels`) that ranks and replicas must find on their nodes."""

    def check(self) -> None:
        """Whether this process, and so the cluster that it has connected to, keeps to it. Raises `ConfigError`."""
        if self.require_tls and not uses_tls():
            raise ConfigError(
                "NetworkConfig(require_tls=True): this process talks to Ray without TLS. Set RAY_USE_TLS=1, "
                "RAY_TLS_SERVER_CERT, "
                "RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT here and on every node."
            )
        if self.require_token_auth and os.environ.get("RAY_AUTH_MODE", "disabled").lower() != "token":
            raise ConfigError(
                "NetworkConfig(require_token_auth=True): this process talks to Ray without a token. Start the cluster and this "
                "process with RAY_AUTH_MODE=token (`ray get-auth-token --generate` makes one)."
            )

    def place(self, config: C) -> C:
        """The actors' settings, with the labels."""
        if not self.node_labels:
            return config
        options = dict(config.actor_options)
        options["label_selector"] = {**options.get("label_selector", {}), **self.node_labels}
        return config.model_copy(update={"actor_options": options})
