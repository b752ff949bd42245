"""A gateway that is served on the tests' own Ray."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

import raysessions as rs
from raysessions.gateway.keys import KeyStore
from raysessions.storage_location import StorageLocation

TENANT = "ours"


@dataclass(frozen=True)
class ServedGateway:
    """Where it is, and a driver of the same tenant and storage beside it."""

    url: str
    key: str
    service: rs.ServiceClient
    base_model: str
    output_uri: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def new_key(self, tenant: str) -> str:
        return KeyStore(StorageLocation(self.output_uri)).create(tenant)[0]


def gateway_process() -> psutil.Process:
    """Of the served gateway's replica."""
    found = [one for one in psutil.Process().children(recursive=True) if "ServeReplica:raysessions" in "".join(one.cmdline())]
    return max(found, key=lambda process: process.create_time())
