"""Names of sessions, of groups, and of the versions in them: `raysessions://GROUP/vN`."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from raysessions.errors import ConfigError

SCHEME = "raysessions://"
_NAME = r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?"
_URI = re.compile(rf"{SCHEME}(?P<group>{_NAME})/v(?P<version>[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class VersionUri:
    """One immutable version of a group."""

    group: str
    version: int

    def __str__(self) -> str:
        return f"{SCHEME}{self.group}/v{self.version}"

    @classmethod
    def parse(cls, uri: str) -> VersionUri:
        match = _URI.fullmatch(uri)
        if match is None:
            raise ConfigError(f"{uri!r} is not a version: expected {SCHEME}GROUP/vN, as the saving calls return.")
        return cls(match["group"], int(match["version"]))


def new_session_id(prefix: str = "session") -> str:
    """A fresh id. It names files and PEFT adapters, so it has no dots or slashes."""
    return f"{prefix}-{secrets.token_hex(4)}"


def new_token() -> str:
    """Known to its maker only."""
    return secrets.token_hex(8)


def check_name(name: str, what: str = "Session name") -> str:
    """`name` if it may name a session, a group or a tenant: small letters, digits, `-` and `_`, at most 64."""
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise ConfigError(f"{what} {name!r}: use 1 to 64 small letters, digits, '-' or '_', not '-' or '_' at the ends.")
    return name
