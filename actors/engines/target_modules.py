"""Which linear layers of a model get an adapter."""

from __future__ import annotations

import torch
from peft.tuners.lora import LoraLayer

from raysessions.config import LoraConfig
from raysessions.errors import ConfigError


def choose(model: torch.nn.Module, lora: LoraConfig) -> tuple[str, ...]:
    """Names (without path, sorted) of the layers that `lora` asks for. Raises `ConfigError` when there are none."""
    attention, mlp = _linear_layers(model)
    if lora.target_modules is not None:
        known = attention | mlp
        if unknown := set(lora.target_modules) - known:
            raise ConfigError(f"target_modules {sorted(unknown)} are no linear layers of this model: {sorted(known)}.")
        chosen = set(lora.target_modules)
    else:
        chosen = (attention if lora.train_attn else set()) | (mlp if lora.train_mlp else set())
    if not chosen:
        raise ConfigError("The adapter has no layers: set train_attn or train_mlp, or name target_modules.")
    return tuple(sorted(chosen))


def _linear_layers(model: torch.nn.Module) -> tuple[set[str], set[str]]:
    """Names of the linear layers inside attention blocks, and of the others in the decoder (the MLPs)."""
    attention: set[str] = set()
    mlp: set[str] = set()
    inside_lora: tuple[str, ...] = ()
    for path, module in model.get_decoder().named_modules():
        if isinstance(module, LoraLayer):
            inside_lora = (*inside_lora, f"{path}.")
        elif not isinstance(module, torch.nn.Linear) or path.startswith(inside_lora or ("\0",)):
            continue
        parent, _, name = path.rpartition(".")
        (attention if "attn" in parent or "attention" in parent else mlp).add(name)
    return attention, mlp
