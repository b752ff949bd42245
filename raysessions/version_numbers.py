"""Numbers of versions, each given once, to any number of writers on storage that has no locks."""

from __future__ import annotations

import secrets
import time

from raysessions.errors import StorageError
from raysessions.storage import Storage

CLAIMS = ".numbers"
"""Folder in a group whose empty files `N-WRITER` say who wants which number."""
MAX_ATTEMPTS = 50


class VersionNumbers:
    """A writer says which number it wants by a file, and has it if it then sees no file of another writer with that number or a
    higher one.

    Two writers never have the same number: the later of the two files was written after the other one, or its successor, could
    be seen. When both see each other, both try again. Numbers go up in the order in which they are had; some may be left out.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def next(self, group: str) -> int:
        """A number that nobody else has or will have, above all that were had before."""
        folder = f"{group}/{CLAIMS}"
        for attempt in range(MAX_ATTEMPTS):
            number = max((claimed for claimed, _ in self._claims(folder)), default=0) + 1
            claim = f"{number}-{secrets.token_hex(8)}"
            self._storage.write(f"{folder}/{claim}", [])
            seen = self._claims(folder)
            if all(other == claim or claimed < number for claimed, other in seen):
                for claimed, name in seen:
                    if claimed < number:  # the one just had stands for all before it
                        self._storage.delete(f"{folder}/{name}")
                return number
            self._storage.delete(f"{folder}/{claim}")
            time.sleep(secrets.randbelow(10 * (attempt + 1)) / 1000)
        raise StorageError(
            f"{self._storage.root}/{folder}: {MAX_ATTEMPTS} other writers took the next version's number. Save again."
        )

    def _claims(self, folder: str) -> list[tuple[int, str]]:
        names = [info.base_name for info in self._storage.list(folder)]
        return [
            (int(number), name) for name in names if (number := name.partition("-")[0]).isdigit() and not name.endswith(".tmp")
        ]
