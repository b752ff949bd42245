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

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_DTYPES = {"bfloat16": ("BF16", np.uint16), "float32": ("F32", np.float32)}
"""Names as written and read by safetensors, and how numpy holds them."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A LoRA adapter on its way to the samplers: one flat array and what lies where."""

    flat: np.ndarray
    """float32, or uint16 holding the bits of bfloat16; shape (num_parameters,)."""
    entries: tuple[tuple[str, tuple[int, ...]], ...]
    """PEFT tensor name and shape, in the order of `flat`."""
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    num_modules: int

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.flat.dtype == np.uint16 else "float32"


def to_peft_files(weights: AdapterWeights) -> dict[str, bytes]:
    """The files of a PEFT folder, by name."""
    flat = np.ascontiguousarray(weights.flat)
    specs, begin = {}, 0
    for name, shape in weights.entries:
        size = math.prod(shape)
        part = flat[begin : begin + size]
        specs[name] = TensorSpec(dtype=weights.dtype, shape=list(shape), data_ptr=part.ctypes.data, data_len=part.nbytes)
        begin += size
    config = {
        "peft_type": "LORA",
        "r": weights.rank,
        "lora_alpha": weights.alpha,
        "target_modules": list(weights.target_modules),
        "bias": "none",
    }
    return {
        WEIGHTS_FILE: safetensors.serialize(specs, {"format": "pt"}),
        CONFIG_FILE: json.dumps(config).encode(),
    }


def from_peft_files(files: Mapping[str, bytes]) -> AdapterWeights:
    """The inverse of `to_peft_files`; the order of the tensors is safetensors' own."""
    config: dict[str, Any] = json.loads(files[CONFIG_FILE])
    tensors = safetensors.deserialize(files[WEIGHTS_FILE])
    kinds = dict(_DTYPES.values())
    parts = [np.frombuffer(tensor["data"], kinds[tensor["dtype"]]) for _, tensor in tensors]
    return AdapterWeights(
        flat=np.concatenate(parts),
        entries=tuple((name, tuple(tensor["shape"])) for name, tensor in tensors),
        rank=config["r"],
        alpha=config["lora_alpha"],
        target_modules=tuple(config["target_modules"]),
        num_modules=sum(".lora_A." in name for name, _ in tensors),
    )
