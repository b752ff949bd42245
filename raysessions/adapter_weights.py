"""A LoRA adapter as one flat array, and as the files of a PEFT folder. Without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors
from safetensors import TensorSpec

from raysessions.errors import CheckpointMismatchError

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_DTYPES = {"bfloat16": ("BF16", np.uint16), "float32": ("F32", np.float32)}
"""Names as written and read by safetensors, and how numpy holds them."""

_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")

Entries = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the tensors in a flat array, in its order."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A LoRA adapter on its way between processes: one flat array and what lies where."""

    flat: np.ndarray
    """float32, or uint16 holding the bits of bfloat16; shape (num_parameters,)."""
    entries: Entries
    """PEFT tensor name and shape, in the order of `flat`."""
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    num_modules: int

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.flat.dtype == np.uint16 else "float32"


def to_peft_files(weights: AdapterWeights, base_model: str | None = None) -> dict[str, bytes]:
    """The files of a PEFT folder, by name."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": weights.rank,
        "lora_alpha": weights.alpha,
        "target_modules": list(weights.target_modules),
        "bias": "none",
    }
    return {
        WEIGHTS_FILE: to_safetensors({"": weights.flat}, weights.entries),
        CONFIG_FILE: json.dumps(config).encode(),
    }


def from_peft_files(files: Mapping[str, Any]) -> AdapterWeights:
    """The inverse of `to_peft_files`; the order of the tensors is safetensors' own."""
    config: dict[str, Any] = json.loads(bytes(files[CONFIG_FILE]))
    _refuse_other_adapters(config)
    tensors = from_safetensors(files[WEIGHTS_FILE])
    return AdapterWeights(
        flat=np.concatenate([tensor.reshape(-1) for tensor in tensors.values()]),
        entries=tuple((name, tensor.shape) for name, tensor in tensors.items()),
        rank=config["r"],
        alpha=config["lora_alpha"],
        target_modules=tuple(config["target_modules"]),
        num_modules=sum(".lora_A." in name for name in tensors),
    )


def to_safetensors(columns: Mapping[str, np.ndarray], entries: Entries) -> bytes:
    """Flat arrays that share `entries` as one file: each tensor is named by its column's prefix and its own name."""
    specs, held = {}, []
    for prefix, column in columns.items():
        flat = np.ascontiguousarray(column)
        held.append(flat)
        begin = 0
        for name, shape in entries:
            part = flat[begin : begin + math.prod(shape)]
            begin += len(part)
            dtype = "bfloat16" if flat.dtype == np.uint16 else "float32"
            specs[prefix + name] = TensorSpec(dtype=dtype, shape=list(shape), data_ptr=part.ctypes.data, data_len=part.nbytes)
    return safetensors.serialize(specs, {"format": "pt"})


def from_safetensors(content: Any) -> dict[str, np.ndarray]:
    """The tensors by name, in the file's order. Raises `CheckpointMismatchError` for a dtype that adapters do not have."""
    kinds = dict(_DTYPES.values())
    tensors = {}
    for name, tensor in safetensors.deserialize(bytes(content)):
        if tensor["dtype"] not in kinds:
            raise CheckpointMismatchError(f"{name} is {tensor['dtype']}: save the adapter in float32 or bfloat16.")
        tensors[name] = np.frombuffer(tensor["data"], kinds[tensor["dtype"]]).reshape(tensor["shape"])
    return tensors


def from_flat(weights: AdapterWeights, flat: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The tensors by name: of the weights, or of another array in their order."""
    whole = weights.flat if flat is None else flat
    tensors, begin = {}, 0
    for name, shape in weights.entries:
        size = math.prod(shape)
        tensors[name] = whole[begin : begin + size].reshape(shape)
        begin += size
    return tensors


def flatten(tensors: Mapping[str, np.ndarray], entries: Entries) -> np.ndarray:
    """One array in the order of `entries`, float32. Raises `CheckpointMismatchError` unless names and shapes are just these."""
    expected = dict(entries)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if expected != found:
        differing = sorted(expected.items() ^ found.items())[:4]
        raise CheckpointMismatchError(
            f"The saved adapter has other layers or shapes than the session's: {differing}. Create the session with "
            "create_training_client_from_state, which takes rank and layers from the checkpoint."
        )
    return np.concatenate([as_float32(tensors[name]).reshape(-1) for name in expected])


def as_float32(array: np.ndarray) -> np.ndarray:
    """float32 itself, or the bits of bfloat16 widened: exact."""
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array


def _refuse_other_adapters(config: Mapping[str, Any]) -> None:
    """What a session's adapter is not."""
    plain = {
        "peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None,
    }  # fmt: skip
    for name, value in plain.items():
        if (config.get(name) or None) != (value or None):
            raise CheckpointMismatchError(
                f"The adapter has {name}={config[name]!r}: sessions train plain LoRA ({name}={value!r})."
            )
    if str(config.get("init_lora_weights")).startswith(_CHANGE_THE_BASE):
        raise CheckpointMismatchError(
            f"init_lora_weights={config['init_lora_weights']!r} changes the base model's weights, so the adapter does not fit "
            "the "
            "base model itself. Convert it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    if not isinstance(config.get("target_modules"), list):
        raise CheckpointMismatchError(
            f"The adapter's target_modules is {config.get('target_modules')!r}: name the layers in a list in "
            "adapter_config.json."
        )
