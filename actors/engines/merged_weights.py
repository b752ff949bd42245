"""A base model with an adapter's change added to its weights, as a Hugging Face folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from raysessions.adapter_weights import AdapterWeights
from raysessions.errors import CheckpointMismatchError

_PEFT_PREFIX = "base_model.model."


def write_merged(base: Path, adapter: AdapterWeights, folder: Path) -> None:
    """Writes the merged model into the empty `folder`."""
    for name, content in merged_files(base, adapter):
        (folder / name).write_bytes(content)


def merged_files(base: Path, adapter: AdapterWeights) -> Iterator[tuple[str, bytes]]:
    """The merged model's files, name and content, one of the base's files at a time.

    Always from the pristine base, W + alpha / rank · B A in float32 and rounded once to the base's dtype: merging into merged
    weights would round each time.
    """
    changes = _changes(adapter)
    for file in sorted(base.iterdir()):
        if file.suffix == ".safetensors":
            yield file.name, _merged(file, changes)
        elif file.is_file():
            yield file.name, file.read_bytes()
    if changes:
        raise CheckpointMismatchError(
            f"The base model in {base} has no weights named {sorted(changes)[:3]}…: it cannot be merged."
        )


def _changes(adapter: AdapterWeights) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """alpha / rank · B, and A, by the name of the weights they change. float32."""
    tensors = _tensors(adapter)
    modules = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    scale = adapter.alpha / adapter.rank
    return {
        f"{module.removeprefix(_PEFT_PREFIX)}.weight": (
            tensors[f"{module}.lora_B.weight"].float() * scale,
            tensors[f"{module}.lora_A.weight"].float(),
        )
        for module in modules
    }


def _tensors(weights: AdapterWeights) -> dict[str, torch.Tensor]:
    """By PEFT's names."""
    flat = torch.from_numpy(np.array(weights.flat))  # arrays from the object store are read-only
    flat = flat.view(torch.bfloat16) if weights.dtype == "bfloat16" else flat
    sizes = [int(np.prod(shape)) for _, shape in weights.entries]
    parts = flat.split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(weights.entries, parts, strict=True)}


def _merged(source: Path, changes: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> bytes:
    with safe_open(source, framework="pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 - not a dict
        for name in tensors.keys() & changes.keys():
            b, a = changes.pop(name)
            tensors[name] = (tensors[name].float() + b @ a).to(tensors[name].dtype)
        return save(tensors, metadata=weights.metadata())
