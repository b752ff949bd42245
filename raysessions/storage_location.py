"""Where versions are kept. Without pyarrow, which drivers do not need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raysessions.encryption import EncryptionKey
from raysessions.uris import VersionUri

if TYPE_CHECKING:
    from raysessions.ledger import Ledger
    from raysessions.registry import Registry


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """Where versions are kept, and the key they are encrypted with. Travels to the actors that write and read them."""

    output_uri: str | None = None
    """A folder or a URI; None for `home()` on the node that writes."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """For fsspec, which then opens the URI instead of pyarrow: credentials, endpoints, server-side encryption."""
    key: EncryptionKey | None = None

    def identity(self) -> str:
        """Equal for equal locations."""
        options = sorted((name, repr(value)) for name, value in self.options.items())
        return repr((self.output_uri, options, self.key and self.key.key_id))

    def open_registry(self) -> Registry:
        from raysessions.registry import Registry  # brings pyarrow: here, and not when a driver imports this

        return Registry(self)

    def open_ledger(self) -> Ledger:
        from raysessions.ledger import Ledger  # brings pyarrow

        return Ledger(self)


@dataclass(frozen=True, slots=True, eq=False)
class StoredUri:
    """A version and where it is saved: versions of two storages may have the same name."""

    uri: VersionUri
    location: StorageLocation

    def __str__(self) -> str:
        return str(self.uri)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredUri) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[VersionUri, str]:
        return self.uri, self.location.identity()
