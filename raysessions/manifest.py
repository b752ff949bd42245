"""The manifest of a saved version: what it is, and what its files must be."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raysessions.encryption import EncryptionKey
from raysessions.errors import ConfigError, IntegrityError
from raysessions.responses import CheckpointInfo
from raysessions.uris import VersionUri

FORMAT = 1


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as it lies in the storage, encrypted if it is."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Readable without a key, so that versions can be listed; with a key it is signed, so that a change shows."""

    info: CheckpointInfo
    files: Mapping[str, FileRecord]
    signature: str | None = None
    """HMAC-SHA256 of the rest under the encryption key."""

    def to_json(self, key: EncryptionKey | None) -> bytes:
        content = self._content()
        if key is not None:
            content["signature"] = _sign(key, content)
        return json.dumps(content, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes | memoryview, uri: VersionUri) -> Manifest:
        """Raises `IntegrityError` when it is no manifest of `uri`."""
        try:
            content = json.loads(bytes(text))
            info = CheckpointInfo(**{**content["info"], "target_modules": tuple(content["info"]["target_modules"])})
            files = {name: FileRecord(**record) for name, record in content["files"].items()}
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"The manifest of {uri} cannot be read ({error!r}): it was changed, or written by a newer raysessions."
            ) from error
        if info.path != str(uri):
            raise IntegrityError(f"The manifest of {uri} is that of {info.path}: restore it, or use another version.")
        return cls(info, files, content.get("signature"))

    def check_key(self, key: EncryptionKey | None) -> None:
        """Raises `IntegrityError` unless this was written with `key`."""
        path = self.info.path
        if key is None:
            if self.info.encrypted:
                raise IntegrityError(f"{path} is encrypted: give the encryption_key that it was saved with.")
        elif not self.info.encrypted:
            raise IntegrityError(f"{path} was saved without encryption: leave encryption_key out to read it.")
        elif not hmac.compare_digest(self.signature or "", _sign(key, self._content())):
            raise IntegrityError(f"{path} was saved with another encryption_key, or its manifest was changed.")

    def _content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "info": asdict(self.info),
            "files": {name: asdict(record) for name, record in self.files.items()},
        }


def checked_ttl(ttl_seconds: float | None) -> float | None:
    """A time to live; None: for ever. Raises `ConfigError` unless it is above 0."""
    if ttl_seconds is not None and not ttl_seconds > 0:
        raise ConfigError(f"ttl_seconds is {ttl_seconds!r}: give seconds above 0, or None to keep it.")
    return ttl_seconds


def expiry(ttl_seconds: float | None) -> float | None:
    """When what lives `ttl_seconds` from now ends."""
    ttl_seconds = checked_ttl(ttl_seconds)
    return None if ttl_seconds is None else time.time() + ttl_seconds


def _sign(key: EncryptionKey, content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True).encode()
    return hmac.new(key.secret, b"raysessions manifest" + text, hashlib.sha256).hexdigest()
