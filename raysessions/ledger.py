"""What every session has used, kept beside the versions.

ROOT/ledger/TENANT/SESSION.json: the totals of each process that counted. Written anew as they grow, so that writing twice
counts once.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from raysessions.storage import Storage
from raysessions.storage_location import StorageLocation
from raysessions.usage import SessionUsage, Usage

FOLDER = "ledger"


class Ledger:
    """Of one storage. Its only writer is the cluster's manager."""

    def __init__(self, location: StorageLocation) -> None:
        self._storage = Storage(location)

    def write(self, session: str, tenant: str, base_model: str, totals: dict[str, Usage]) -> None:
        """`totals` by the names of their counts; those that are not in it stay."""
        path = _path(tenant, session)
        content = self._read(path) or {"base_model": base_model, "totals": {}}
        content["totals"] |= {count: asdict(usage) for count, usage in totals.items()}
        self._storage.write(path, [json.dumps(content, indent=1).encode()])

    def read(self, session: str | None, tenant: str) -> list[SessionUsage]:
        """The tenant's sessions, or one of them, by name."""
        names = (
            [session]
            if session
            else [
                found.base_name.removesuffix(".json")
                for found in self._storage.list(f"{FOLDER}/{tenant}")
                if found.base_name.endswith(".json")
            ]
        )
        entries = []
        for name in sorted(names):
            content = self._read(_path(tenant, name))
            if content is not None:
                usage = sum((Usage(**counted) for counted in content["totals"].values()), Usage())
                entries.append(SessionUsage(name, tenant, content["base_model"], usage))
        return entries

    def _read(self, path: str) -> dict[str, Any] | None:
        try:
            return json.loads(bytes(self._storage.read(path)))
        except FileNotFoundError:
            return None


def _path(tenant: str, session: str) -> str:
    return f"{FOLDER}/{tenant}/{session}.json"
