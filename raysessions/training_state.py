"""All that continues a session's training elsewhere as if it had not stopped, and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysessions.adapter_weights import AdapterWeights, from_peft_files, from_safetensors, to_peft_files, to_safetensors

OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_FILE = "trainer_state.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Independent of the number of ranks and of the ZeRO stage. An accumulated gradient is not part of it."""

    weights: AdapterWeights
    """float32, in the files' or a model's order."""
    moments: dict[str, np.ndarray]
    """AdamW's `exp_avg` and `exp_avg_sq`: float32, shape and order of `weights.flat`. Empty before the first step, and in a
    state that is to start with a fresh optimizer."""
    step: int
    """Optimizer steps so far."""
    seed: int
    """Of the adapter's initial weights. Training itself draws no random numbers."""

    def without_optimizer(self) -> TrainingState:
        return TrainingState(self.weights, {}, 0, self.seed)


def to_state_files(state: TrainingState, base_model: str) -> dict[str, bytes]:
    """A PEFT folder with the optimizer beside it, by file name."""
    files = to_peft_files(state.weights, base_model)
    files[TRAINER_FILE] = json.dumps({"step": state.step, "seed": state.seed}).encode()
    if state.moments:
        columns = {f"{name}.": state.moments[name] for name in MOMENTS}
        files[OPTIMIZER_FILE] = to_safetensors(columns, state.weights.entries)
    return files


def from_state_files(files: Mapping[str, Any]) -> TrainingState:
    """The inverse. A plain PEFT folder is a state before the first step."""
    weights = from_peft_files(files)
    trainer = json.loads(bytes(files[TRAINER_FILE])) if TRAINER_FILE in files else {"step": 0, "seed": 0}
    moments = {}
    if OPTIMIZER_FILE in files:
        tensors = from_safetensors(files[OPTIMIZER_FILE])
        moments = {
            moment: np.concatenate([tensors[f"{moment}.{name}"].reshape(-1) for name, _ in weights.entries])
            for moment in MOMENTS
        }
    return TrainingState(weights, moments, trainer["step"], trainer["seed"])
