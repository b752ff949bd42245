"""The versions that a pool answers from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import ray

from raysessions.errors import SamplerExpiredError
from raysessions.uris import VersionUri


@dataclass(slots=True, eq=False)
class Version:
    """One immutable adapter. Its number in vLLM and its name are never used for other weights: vLLM caches prefixes by name."""

    uri: VersionUri
    adapter_id: int
    weights: tuple[ray.ObjectRef]
    """Of an AdapterWeights. Kept while the version lives, so that a replica can load it at any time; lost with its owner, the
    session's host, and then read from the registry."""
    num_modules: int
    """Layers that the adapter changes: what each replica must have bound."""
    leases: set[bytes] = field(default_factory=set)
    """Ids of the objects that its clients hold."""
    is_retired: bool = False


class Versions:
    """Of each session, the newest few and those that a client still holds."""

    def __init__(self, kept: int, is_held: Callable[[bytes], bool]) -> None:
        self._kept = kept
        self._is_held = is_held
        self._live: dict[VersionUri, Version] = {}
        self._adapter_ids = itertools.count(1)

    def __contains__(self, uri: VersionUri) -> bool:
        return uri in self._live

    def __len__(self) -> int:
        return len(self._live)

    def new(self, uri: VersionUri, weights: tuple[ray.ObjectRef], num_modules: int) -> Version:
        """A version that is not live yet."""
        return Version(uri, next(self._adapter_ids), weights, num_modules)

    def newest_first(self) -> list[Version]:
        return sorted(self._live.values(), key=lambda version: -version.adapter_id)

    def get(self, uri: VersionUri) -> Version:
        """Raises `SamplerExpiredError` when it is not live, or not any more."""
        if uri not in self._live:
            raise SamplerExpiredError(
                f"{uri} is not live: of a session the {self._kept} newest versions are (SamplingConfig.max_live_versions), and "
                "older ones for as long as somebody holds a sampling client of them. Use a newer one, or save again."
            )
        return self._live[uri]

    def add(self, version: Version) -> list[Version]:
        """Makes it live. Returns those of its session that are live no more."""
        self._live[version.uri] = version
        session = self.of_session(version.uri.session_id)
        return [self.retire(old) for old in session[: -self._kept] if not self.is_held(old)]

    def of_session(self, session_id: str) -> list[Version]:
        """Oldest first."""
        versions = [version for version in self._live.values() if version.uri.session_id == session_id]
        return sorted(versions, key=lambda version: version.uri.version)

    def retire(self, version: Version) -> Version:
        self._live.pop(version.uri, None)
        version.is_retired = True
        return version

    def is_held(self, version: Version) -> bool:
        """Whether a client of it exists anywhere."""
        version.leases = {lease for lease in version.leases if self._is_held(lease)}
        return bool(version.leases)
