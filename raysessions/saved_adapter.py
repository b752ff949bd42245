"""The adapter of a saved version, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from raysessions.adapter_weights import CONFIG_FILE, WEIGHTS_FILE, AdapterWeights, from_peft_files, to_peft_files
from raysessions.responses import CheckpointInfo
from raysessions.uris import VersionUri

if TYPE_CHECKING:
    from raysessions.registry import Registry

FOLDER = "adapter/"
"""Where a merged version has its adapter: beside the model's files, transformers would add it to weights that have it."""


def beside_merged_weights(weights: AdapterWeights, base_model: str) -> Iterable[tuple[str, bytes]]:
    """The adapter's files for a merged version."""
    return ((f"{FOLDER}{name}", content) for name, content in to_peft_files(weights, base_model).items())


def read_adapter(registry: Registry, uri: VersionUri) -> tuple[CheckpointInfo, AdapterWeights]:
    info = registry.info(uri)
    prefix = FOLDER if info.kind == "merged" else ""
    _, files = registry.read(uri, only=[prefix + CONFIG_FILE, prefix + WEIGHTS_FILE])
    return info, from_peft_files({name.removeprefix(prefix): content for name, content in files.items()})
