"""Versions of checkpoints on storage, where they outlive the processes that made them.

ROOT/GROUP/vN/…                files of the version
ROOT/GROUP/vN/manifest.json    what it is, its files' sizes and checksums; written last: without it there is no version
ROOT/GROUP/.numbers/           who had which number (`version_numbers`)
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from raysessions.encryption import seal, unseal
from raysessions.errors import CheckpointNotFoundError, IntegrityError
from raysessions.manifest import FileRecord, Manifest, expiry
from raysessions.responses import CheckpointInfo, CheckpointKind
from raysessions.storage import Storage
from raysessions.storage_location import StorageLocation
from raysessions.uris import VersionUri, check_name
from raysessions.version_numbers import VersionNumbers

VERSIONS = "versions"
MANIFEST = "manifest.json"
ABANDONED_S = 24 * 3600.0
"""Files of this age without a manifest were left by a writer that was killed."""
READERS = 8


class Registry:
    """Safe to use from several threads, and from several processes and clusters on the same storage."""

    def __init__(self, location: StorageLocation) -> None:
        self._storage = Storage(location)
        self._key = location.key
        self._numbers = VersionNumbers(self._storage)

    def claim(self, group: str) -> VersionUri:
        """A version that nobody else has or will have, newer than all before it."""
        return VersionUri(group, self._numbers.next(f"{VERSIONS}/{check_name(group, 'Model package group')}"))

    def write(self, uri: VersionUri, info: CheckpointInfo, files: Iterable[tuple[str, bytes]]) -> CheckpointInfo:
        """Writes a claimed version, a file (name, content) at a time. Its path, size and encryption are filled in; after an
        error nothing of it is left."""
        folder = _folder(uri)
        try:
            records = {name: self._write_file(f"{folder}/{name}", content) for name, content in files}
            info = replace(
                info,
                path=str(uri),
                num_bytes=sum(record.num_bytes for record in records.values()),
                encrypted=self._key is not None,
            )
            self._write_manifest(uri, Manifest(info, records))
        except BaseException:
            self._discard(folder)
            raise
        return info

    def read(self, uri: VersionUri, only: Collection[str] | None = None) -> tuple[CheckpointInfo, dict[str, Any]]:
        """The version and the content of its files, or of some, by name.

        Raises `CheckpointNotFoundError`, or `IntegrityError` when a file is not as it was written or the key is another one.
        """
        manifest = self._manifest(uri)
        folder = _folder(uri)
        files = {}
        for name in manifest.files if only is None else only:
            record = manifest.files[name]
            try:
                content = self._storage.read(f"{folder}/{name}")
            except FileNotFoundError as error:
                raise self._not_found(uri) from error
            if hashlib.sha256(content).hexdigest() != record.sha256:
                raise IntegrityError(f"{folder}/{name} is not as it was written: restore it, or use another version.")
            files[name] = unseal(self._key, f"{folder}/{name}", content) if self._key else content
        return manifest.info, files

    def files(self, uri: VersionUri) -> Sequence[str]:
        """Their names."""
        return sorted(self._manifest(uri).files)

    def info(self, uri: VersionUri) -> CheckpointInfo:
        """Raises `CheckpointNotFoundError`."""
        return self._manifest(uri).info

    def list(
        self, group: str, *, kind: CheckpointKind | None = None, session_id: str | None = None
    ) -> Iterator[CheckpointInfo]:
        """The group's versions, newest first; what they are is read as far as they are asked for."""
        uris = self._uris(group)
        with ThreadPoolExecutor(READERS) as readers:
            while batch := list(itertools.islice(uris, READERS)):
                for info in readers.map(self._info_or_none, batch):
                    if info is not None and kind in (None, info.kind) and session_id in (None, info.session_id):
                        yield info

    def groups(self) -> Sequence[str]:
        return sorted(found.base_name for found in self._storage.list(VERSIONS) if not found.base_name.startswith("."))

    def delete(self, uri: VersionUri) -> None:
        """Safe to call again. The number is not used again."""
        folder = _folder(uri)
        self._storage.delete(f"{folder}/{MANIFEST}")  # first, so that it is never listed without its files
        self._storage.delete_folder(folder)

    def set_ttl(self, uri: VersionUri, ttl_seconds: float | None) -> None:
        """Deletes the version `ttl_seconds` from now; None: never."""
        manifest = self._manifest(uri)
        expires_at = expiry(ttl_seconds)
        self._write_manifest(uri, Manifest(replace(manifest.info, expires_at=expires_at), manifest.files))

    def sweep(self, group: str) -> None:
        """Deletes versions whose time is over, and what killed writers left."""
        now = time.time()
        for uri in self._uris(group):
            try:
                manifest = self._read_manifest(uri)
            except CheckpointNotFoundError:
                files = list(self._storage.list(_folder(uri), recursive=True))
                if files and all(file.mtime_ns is not None and now - file.mtime_ns / 1e9 > ABANDONED_S for file in files):
                    self._storage.delete_folder(_folder(uri))
            else:
                if _is_over(manifest.info, now):
                    self.delete(uri)

    def _write_file(self, path: str, content: bytes) -> FileRecord:
        digest, size = hashlib.sha256(), 0

        def told() -> Iterator[bytes]:
            nonlocal size
            for chunk in seal(self._key, path, [content]) if self._key else [content]:
                digest.update(chunk)
                size += len(chunk)
                yield chunk

        self._storage.write(path, told())
        return FileRecord(size, digest.hexdigest())

    def _write_manifest(self, uri: VersionUri, manifest: Manifest) -> None:
        self._storage.write(f"{_folder(uri)}/{MANIFEST}", [manifest.to_json(self._key)])

    def _manifest(self, uri: VersionUri) -> Manifest:
        manifest = self._read_manifest(uri)
        if _is_over(manifest.info, time.time()):
            raise self._not_found(uri)
        manifest.check_key(self._key)
        return manifest

    def _read_manifest(self, uri: VersionUri) -> Manifest:
        try:
            return Manifest.from_json(self._storage.read(f"{_folder(uri)}/{MANIFEST}"), uri)
        except FileNotFoundError as error:
            raise self._not_found(uri) from error

    def _info_or_none(self, uri: VersionUri) -> CheckpointInfo | None:
        """None for what is being written, was deleted meanwhile, or has expired."""
        try:
            info = self._read_manifest(uri).info
        except CheckpointNotFoundError:
            return None
        return None if _is_over(info, time.time()) else info

    def _uris(self, group: str) -> Iterator[VersionUri]:
        """Newest first."""
        names = [found.base_name for found in self._storage.list(f"{VERSIONS}/{check_name(group, 'Model package group')}")]
        numbers = sorted((int(name[1:]) for name in names if name[:1] == "v" and name[1:].isdigit()), reverse=True)
        return (VersionUri(group, number) for number in numbers)

    def _discard(self, folder: str) -> None:
        try:
            self._storage.delete_folder(folder)
        except Exception:  # the error that led here is the one to tell; `sweep` deletes what is left
            return

    def _not_found(self, uri: VersionUri) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(f"{uri} is not in the registry at {self._storage.root}: see list_checkpoints().")


def _is_over(info: CheckpointInfo, now: float) -> bool:
    return info.expires_at is not None and info.expires_at <= now


def _folder(uri: VersionUri) -> str:
    return f"{VERSIONS}/{uri.group}/v{uri.version}"
