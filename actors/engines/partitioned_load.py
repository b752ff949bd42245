"""Loading a base model that ZeRO stage 3 partitions, one weight at a time.

transformers' own loader reads the whole checkpoint into rank 0's memory first. Here no rank ever holds more than its part and
the weight at hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers.integrations import HfDeepSpeedConfig

from raysessions.errors import ModelNotFoundError


def load_partitioned(folder: Path, settings: dict[str, Any], **arguments: Any) -> transformers.PreTrainedModel:
    """The causal language model in `folder`, partitioned over the ranks. Every rank must call it.

    A checkpoint whose names are not the model's (an old format, or one that transformers converts as it reads) goes through
    transformers' loader.
    """
    partitioning = HfDeepSpeedConfig(settings)  # while it lives, transformers creates every parameter partitioned
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, **arguments)
    files = _files(folder)
    if not _have_same_names(model, files):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **arguments)
        del partitioning
        return model
    for name, parameter in model.named_parameters():
        _fill(parameter, files[name], name)
    del partitioning
    return model


def _files(folder: Path) -> dict[str, Path]:
    """Which file has which weight; empty if there are no safetensors files."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        return {}
    with safe_open(single, framework="pt") as weights:
        return dict.fromkeys(weights.keys(), single)


def _have_same_names(model: transformers.PreTrainedModel, files: dict[str, Path]) -> bool:
    """Tied weights have one name in the model and may have several in the file."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    persistent = {name for name, _ in model.named_buffers()} & set(model.state_dict())
    return not persistent and set(files) <= known and all(name in files for name, _ in model.named_parameters())


def _fill(parameter: torch.nn.Parameter, file: Path, name: str) -> None:
    import deepspeed

    # Leaving the context, every rank takes its part of what rank 0 has.
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        if torch.distributed.get_rank() == 0:
            # Opened for one weight: what was read stays mapped, and counts as this process's, until the file is closed.
            with safe_open(file, framework="pt") as weights:
                tensor = weights.get_tensor(name)
                if tensor.shape != parameter.shape:
                    raise ModelNotFoundError(
                        f"{file}: {name} has shape {tuple(tensor.shape)}, config.json says {tuple(parameter.shape)}."
                    )
                parameter.data.copy_(tensor)
                del tensor
