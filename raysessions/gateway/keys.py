"""API keys and whose they are. Only their hashes are kept: ROOT/keys/HASH.json."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from dataclasses import asdict, dataclass

from raysessions.errors import ConfigError
from raysessions.storage import Storage
from raysessions.storage_location import StorageLocation
from raysessions.uris import check_name

PREFIX = "tml-"
"""Of every key: the tinker SDK sends no others."""
FOLDER = "keys"
ID_LENGTH = 12


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a key."""

    key_id: str
    """The first digits of its hash, to name it by."""
    tenant: str
    note: str
    created_at: float
    """Seconds since the epoch."""


class KeyStore:
    """Of one storage."""

    def __init__(self, location: StorageLocation) -> None:
        self._storage = Storage(location)

    def create(self, tenant: str, note: str = "") -> tuple[str, ApiKey]:
        """A new key, which nobody can find out again, and what is kept of it."""
        secret = PREFIX + secrets.token_urlsafe(32)
        digest = digest_of(secret)
        key = ApiKey(digest[:ID_LENGTH], check_name(tenant, "Tenant"), note, time.time())
        self._storage.write(f"{FOLDER}/{digest}.json", [json.dumps(asdict(key)).encode()])
        return secret, key

    def find(self, digest: str) -> ApiKey | None:
        """Of a secret's digest; None if there is no such key."""
        try:
            return ApiKey(**json.loads(bytes(self._storage.read(f"{FOLDER}/{digest}.json"))))
        except FileNotFoundError:
            return None

    def list(self) -> list[ApiKey]:
        """Oldest first."""
        names = [found.base_name for found in self._storage.list(FOLDER)]
        keys = [ApiKey(**json.loads(bytes(self._storage.read(f"{FOLDER}/{name}")))) for name in names if name.endswith(".json")]
        return sorted(keys, key=lambda key: key.created_at)

    def revoke(self, key_id: str) -> None:
        """Raises `ConfigError` if there is no such key."""
        names = [found.base_name for found in self._storage.list(FOLDER) if found.base_name.startswith(key_id)]
        if len(key_id) < ID_LENGTH or len(names) != 1:
            raise ConfigError(f"There is no key {key_id!r}: `raysessions keys list` names those there are.")
        self._storage.delete(f"{FOLDER}/{names[0]}")


def digest_of(secret: str) -> str:
    """What is kept of a key. Keys are random, so that a plain hash is enough: there is nothing to guess."""
    return hashlib.sha256(secret.encode()).hexdigest()
