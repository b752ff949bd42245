"""The part of ServiceClient that looks after saved versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raysessions.errors import ConfigError
from raysessions.future import APIFuture
from raysessions.responses import CheckpointInfo, CheckpointKind
from raysessions.settings import Settings
from raysessions.uris import VersionUri

KINDS = ("sampler", "state", "merged")


class CheckpointCatalogue:
    """Works on the registry at the client's `output_uri`, from the cluster: this machine need not see it."""

    _manager: Any
    _settings: Settings

    def list_checkpoints(
        self, kind: CheckpointKind | None = None, group: str | None = None, limit: int = 100
    ) -> list[CheckpointInfo]:
        """The group's saved versions, newest first; of one kind ("sampler", "state", "merged"), or of all.

        `group` None: the client's `model_package_group`.
        """
        if kind is not None and kind not in KINDS:
            raise ConfigError(f"kind is {kind!r}: choose one of {', '.join(KINDS)}, or None for all.")
        if limit < 1:
            raise ConfigError(f"limit is {limit}: give at least 1.")
        return self._ask("list_checkpoints", group or self._settings.model_package_group, kind, limit)

    def get_latest_checkpoint(self, kind: CheckpointKind, group: str | None = None) -> CheckpointInfo | None:
        """The group's newest version of that kind; None if there is none."""
        return next(iter(self.list_checkpoints(kind, group, limit=1)), None)

    def get_checkpoint(self, path: str) -> CheckpointInfo:
        """Raises `CheckpointNotFoundError`."""
        return self._ask("get_checkpoint", VersionUri.parse(path))

    def delete_checkpoint(self, path: str) -> None:
        """Deletes that version and nothing else. Safe to call again; its number is not used again."""
        self._ask("delete_checkpoint", VersionUri.parse(path))

    def set_checkpoint_ttl(self, path: str, ttl_seconds: float | None) -> None:
        """Ends the version `ttl_seconds` from now, None: never. Its files go when the next session of the group starts."""
        self._ask("set_checkpoint_ttl", VersionUri.parse(path), ttl_seconds)

    def export_checkpoint(self, path: str, folder: str | Path) -> Path:
        """Writes a version's files, decrypted, into a new folder on this machine, and returns it.

        An adapter is a PEFT folder (`PeftModel.from_pretrained`, vLLM's `--lora-modules`), a merged version a model for
        `transformers`. A folder that a state was exported to is one that a session can start from.
        """
        uri, folder = VersionUri.parse(path), Path(folder)
        names = self._ask("list_files", uri)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(f"{folder} exists: name a new folder, so that nothing is overwritten or mixed.") from None
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(self._ask("read_file", uri, name))
        return folder

    def _ask(self, method: str, *args: Any) -> Any:
        return APIFuture(getattr(self._manager, method).remote(self._settings.location, *args)).result()
