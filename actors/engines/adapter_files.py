"""Adapters as PEFT folders on tmpfs, which is memory: vLLM takes adapters by path, and reloads an evicted one from it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from raysessions.actors.protocol import AdapterWeights

_PREFIX = "raysessions-"


class AdapterFiles:
    """The adapter folders of one engine. Folders of engines whose process is gone are swept away at start."""

    def __init__(self) -> None:
        root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        _sweep(root)
        self.root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))

    def write(self, adapter_id: int, weights: AdapterWeights) -> Path:
        folder = self.folder(adapter_id)
        folder.mkdir()
        save_file(_tensors(weights), folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": weights.rank,
            "lora_alpha": weights.alpha,
            "target_modules": list(weights.target_modules),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    def folder(self, adapter_id: int) -> Path:
        return self.root / str(adapter_id)

    def remove(self, adapter_id: int) -> None:
        shutil.rmtree(self.folder(adapter_id), ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def _tensors(weights: AdapterWeights) -> dict[str, torch.Tensor]:
    flat = torch.from_numpy(np.array(weights.flat))  # arrays from the object store are read-only
    flat = flat.view(torch.bfloat16) if weights.dtype == "bfloat16" else flat
    sizes = [int(np.prod(shape)) for _, shape in weights.entries]
    parts = flat.split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(weights.entries, parts, strict=True)}


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
