"""Files under one root, on any filesystem that pyarrow or fsspec knows. Every error names the path and the reason."""

from __future__ import annotations

import contextlib
import getpass
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pyarrow import ArrowInvalid, fs

from raysessions.errors import ConfigError, StorageError
from raysessions.models import home
from raysessions.storage_location import StorageLocation

OBJECT_STORES = ("s3", "gcs", "gs", "abfs")
"""In the names of filesystems that make no folders; s3fs would make a missing bucket instead."""
LIST_ATTEMPTS = 3


class Storage:
    """Paths are relative to the root, with `/` between their parts."""

    def __init__(self, location: StorageLocation) -> None:
        uri = location.output_uri or str(home())
        self.root = uri.rstrip("/")
        try:
            if location.options:
                self._filesystem, self._prefix = _open_with_fsspec(self.root, location.options)
            elif "://" in uri:
                self._filesystem, self._prefix = fs.FileSystem.from_uri(uri)
            else:
                self._filesystem, self._prefix = fs.LocalFileSystem(), str(Path(uri).expanduser().absolute())
        except (ArrowInvalid, OSError, ValueError, ImportError) as error:
            raise ConfigError(f"output_uri {uri!r} cannot be opened: {error}") from error
        self._prefix = self._prefix.rstrip("/")
        self._renames = isinstance(self._filesystem, fs.LocalFileSystem)
        self._has_folders = not any(name in self._filesystem.type_name for name in OBJECT_STORES)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """All of it or nothing: a file of that name appears when it is whole."""
        with self._told(path):
            if self._has_folders:
                self._filesystem.create_dir(self._full(path.rpartition("/")[0]), recursive=True)
            if not self._renames:  # an object store shows an object when its upload is complete
                self._write(self._full(path), chunks)
                return
            temporary = f"{self._full(path)}.{secrets.token_hex(8)}.tmp"  # threads may write the same file
            try:
                self._write(temporary, chunks)
                self._filesystem.move(temporary, self._full(path))
            except BaseException:
                with contextlib.suppress(OSError):
                    self._filesystem.delete_file(temporary)
                raise

    def read(self, path: str) -> memoryview:
        """Raises FileNotFoundError if there is none."""
        try:
            with self._filesystem.open_input_file(self._full(path)) as stream:
                return memoryview(stream.read_buffer()).cast("B")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._error(path, error) from error

    def list(self, folder: str, *, recursive: bool = False) -> Iterator[fs.FileInfo]:
        """What lies in the folder; nothing if there is none. `FileInfo.base_name` is the name."""
        selector = fs.FileSelector(self._full(folder), allow_not_found=True, recursive=recursive)
        with self._told(folder):
            for _ in range(LIST_ATTEMPTS - 1):
                with contextlib.suppress(NotADirectoryError):  # what pyarrow says of fsspec's when it is made at this moment
                    return self._listed(selector)
            return self._listed(selector)

    def _listed(self, selector: fs.FileSelector) -> Iterator[fs.FileInfo]:
        try:
            return iter(self._filesystem.get_file_info(selector))
        except FileNotFoundError:  # s3fs, when the last file in it has gone at this moment
            return iter(())

    def delete(self, path: str) -> None:
        """One file; safe to call again."""
        with self._told(path), contextlib.suppress(FileNotFoundError):
            self._filesystem.delete_file(self._full(path))

    def delete_folder(self, folder: str) -> None:
        """With all in it; safe to call again."""
        with self._told(folder), contextlib.suppress(FileNotFoundError):
            self._filesystem.delete_dir(self._full(folder))

    def _write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        with self._filesystem.open_output_stream(path) as stream:
            for chunk in chunks:
                stream.write(chunk)

    def _full(self, path: str) -> str:
        return f"{self._prefix}/{path}" if path else self._prefix

    @contextlib.contextmanager
    def _told(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(path, error) from error

    def _error(self, path: str, error: OSError) -> StorageError:
        return StorageError(
            f"{self.root}/{path} cannot be used: {error}. Check that output_uri exists, has room, and may be read and written "
            "by "
            f"the cluster's processes (here user {getpass.getuser()})."
        )


def _open_with_fsspec(uri: str, options: Mapping[str, Any]) -> tuple[fs.FileSystem, str]:
    import fsspec

    # Without its caches: they would hide what other writers have done meanwhile.
    filesystem, path = fsspec.url_to_fs(uri, **{"use_listings_cache": False, "skip_instance_cache": True, **options})
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path
