"""The versions that a pool answers from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import ray

from raysessions.errors import SamplerExpiredError
from raysessions.storage_location import StoredUri


@dataclass(slots=True, eq=False)
class Version:
    """One immutable adapter. Its number in vLLM and its name are never used for other weights: vLLM caches prefixes by name."""

    uri: StoredUri
    session_id: str | None
    """None: it was loaded from the registry, and lives for as long as a client holds it."""
    adapter_id: int
    weights: tuple[ray.ObjectRef]
    """Of an AdapterWeights. Kept while the version lives, so that a replica can load it at any time; lost with its owner, the
    session's host, and then read from the registry."""
    num_modules: int
    """Layers that the adapter changes: what each replica must have bound."""
    leases: set[bytes] = field(default_factory=set)
    """Ids of the objects that its clients hold."""
    is_retired: bool = False

    @property
    def name(self) -> str:
        """In vLLM, which tells adapters apart by it."""
        return f"{self.uri}#{self.adapter_id}"


class Versions:
    """Of each session, the newest few and those that a client still holds."""

    def __init__(self, kept: int, is_held: Callable[[bytes], bool]) -> None:
        self._kept = kept
        self._is_held = is_held
        self._live: dict[StoredUri, Version] = {}
        self._adapter_ids = itertools.count(1)

    def __contains__(self, uri: StoredUri) -> bool:
        return uri in self._live

    def __len__(self) -> int:
        return len(self._live)

    def new(self, uri: StoredUri, session_id: str | None, weights: tuple[ray.ObjectRef], num_modules: int) -> Version:
        """A version that is not live yet."""
        return Version(uri, session_id, next(self._adapter_ids), weights, num_modules)

    def newest_first(self) -> list[Version]:
        return sorted(self._live.values(), key=lambda version: -version.adapter_id)

    def get(self, uri: StoredUri) -> Version:
        """Raises `SamplerExpiredError` when it is not live, or not any more."""
        if uri not in self._live:
            raise SamplerExpiredError(
                f"{uri} is not live: of a session the {self._kept} newest versions are (SamplingConfig.max_live_versions), and "
                "older ones for as long as somebody holds a sampling client of them. Use a newer one, or save again."
            )
        return self._live[uri]

    def add(self, version: Version) -> list[Version]:
        """Makes it live. Returns those that are live no more, of its session and of those from the registry."""
        passing = self.of_session(None)
        self._live[version.uri] = version
        if version.session_id is not None:
            passing += self.of_session(version.session_id)[: -self._kept]
        return [self.retire(old) for old in passing if not self.is_held(old)]

    def of_session(self, session_id: str | None) -> list[Version]:
        """Oldest first."""
        versions = [version for version in self._live.values() if version.session_id == session_id]
        return sorted(versions, key=lambda version: version.uri.uri.version)

    def retire(self, version: Version) -> Version:
        self._live.pop(version.uri, None)
        version.is_retired = True
        return version

    def is_held(self, version: Version) -> bool:
        """Whether a client of it exists anywhere."""
        version.leases = {lease for lease in version.leases if self._is_held(lease)}
        return bool(version.leases)
