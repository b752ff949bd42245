"""An adapter in a folder on this machine, made by PEFT or by `export_checkpoint`, as what a session starts from."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from raysessions.adapter_weights import CONFIG_FILE, WEIGHTS_FILE
from raysessions.config import LoraConfig
from raysessions.errors import CheckpointMismatchError, CheckpointNotFoundError
from raysessions.training_state import OPTIMIZER_FILE, TRAINER_FILE, TrainingState, from_state_files


@dataclass(frozen=True, slots=True)
class PeftFolder:
    """What it holds."""

    lora: LoraConfig
    state: TrainingState
    base_model: str | None
    """As the folder says."""


def read_folder(path: str | Path, *, with_optimizer: bool) -> PeftFolder:
    """Raises `CheckpointNotFoundError`, or `CheckpointMismatchError` for an adapter that sessions do not train."""
    folder = Path(path).expanduser()
    files = {name: (folder / name).read_bytes() for name in _NAMES if (folder / name).is_file()}
    if missing := {CONFIG_FILE, WEIGHTS_FILE} - files.keys():
        raise CheckpointNotFoundError(
            f"{folder} has no {' and no '.join(sorted(missing))}: give a PEFT folder, or a version (raysessions://GROUP/vN)."
        )
    if with_optimizer and OPTIMIZER_FILE not in files:
        raise CheckpointMismatchError(f"{folder} has no {OPTIMIZER_FILE}: use create_training_client_from_state.")
    state = from_state_files(files)
    lora = LoraConfig(
        rank=state.weights.rank,
        alpha=state.weights.alpha,
        seed=secrets.randbits(31),
        target_modules=state.weights.target_modules,
    )
    return PeftFolder(lora, state, json.loads(files[CONFIG_FILE]).get("base_model_name_or_path"))


_NAMES = (CONFIG_FILE, WEIGHTS_FILE, OPTIMIZER_FILE, TRAINER_FILE)
