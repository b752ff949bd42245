"""Versions on a filesystem, local or remote (pyarrow), where they outlive the processes that made them.

ROOT/SESSION/vN/adapter_model.safetensors  a PEFT folder
                adapter_config.json
                manifest.json              sizes and checksums; written last: without it there is no version
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pyarrow import fs

from raysessions.adapter_weights import AdapterWeights, from_peft_files, to_peft_files
from raysessions.errors import CheckpointNotFoundError, IntegrityError
from raysessions.models import home
from raysessions.uris import VersionUri

MANIFEST = "manifest.json"


class Registry:
    """Version numbers are used once, so nobody writes where another does."""

    def __init__(self, root: str | None = None) -> None:
        """`root`: a folder, or a URI that pyarrow knows (s3, gs, hdfs, file); None for `versions` under `home()`."""
        root = str(home() / "versions") if root is None else root
        if "://" in root:
            self._filesystem, self._root = fs.FileSystem.from_uri(root)
        else:
            self._filesystem, self._root = fs.LocalFileSystem(), str(Path(root).expanduser().absolute())

    def write(self, uri: VersionUri, weights: AdapterWeights) -> None:
        folder = self._folder(uri)
        files = to_peft_files(weights)
        self._filesystem.create_dir(folder, recursive=True)
        for name, content in files.items():
            self._write(f"{folder}/{name}", content)
        manifest = {name: {"bytes": len(content), "sha256": _digest(content)} for name, content in files.items()}
        self._write(f"{folder}/{MANIFEST}.tmp", json.dumps(manifest).encode())
        self._filesystem.move(f"{folder}/{MANIFEST}.tmp", f"{folder}/{MANIFEST}")

    def read(self, uri: VersionUri) -> AdapterWeights:
        """Raises `CheckpointNotFoundError`, or `IntegrityError` when a file is not as it was written."""
        folder = self._folder(uri)
        try:
            manifest = json.loads(self._read(f"{folder}/{MANIFEST}"))
            files = {name: self._read(f"{folder}/{name}") for name in manifest}
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{uri} is not in the registry at {self._root}.") from error
        for name, content in files.items():
            if _digest(content) != manifest[name]["sha256"]:
                raise IntegrityError(f"{folder}/{name} is not as it was written: restore it, or use another version.")
        return from_peft_files(files)

    def delete(self, uri: VersionUri) -> None:
        """Safe to call again."""
        if self._filesystem.get_file_info(self._folder(uri)).type is fs.FileType.Directory:
            self._filesystem.delete_dir(self._folder(uri))

    def _folder(self, uri: VersionUri) -> str:
        return f"{self._root}/{uri.session_id}/v{uri.version}"

    def _write(self, path: str, content: bytes) -> None:
        with self._filesystem.open_output_stream(path) as stream:
            stream.write(content)

    def _read(self, path: str) -> bytes:
        with self._filesystem.open_input_file(path) as stream:
            return stream.read()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
