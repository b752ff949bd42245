"""One session's LoRA adapter: its weights, its gradient and its AdamW state, each one flat float32 buffer.

The parameters inside the model are views of the weights, and their `.grad` are views of the gradient, so that an
optimizer step, a clip, a copy or a save is one operation over one array whatever the number of layers.
"""

from __future__ import annotations

import math
import warnings

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer

from raysessions.actors.protocol import AdapterFacts, AdapterWeights
from raysessions.config import LoraConfig
from raysessions.errors import EmptyGradientError, SessionError
from raysessions.types import AdamParams


def activate(model: torch.nn.Module, name: str) -> None:
    """Makes the model's forward use the adapter `name` and no other, also in layers that only others adapt."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_adapter(name)


class Adapter:
    """A LoRA adapter named `name`, injected into `model` by PEFT."""

    def __init__(self, model: torch.nn.Module, name: str, lora: LoraConfig, target_modules: tuple[str, ...]) -> None:
        self.name = name
        self.lora = lora
        self.target_modules = target_modules
        config = PeftLoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(target_modules), lora_dropout=0.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are what we want
            inject_adapter_in_model(config, model, adapter_name=name)
        self.layers: list[tuple[str, LoraLayer]] = [
            (path, module) for path, module in model.named_modules() if isinstance(module, LoraLayer) and name in module.lora_A
        ]
        self._parameters = [
            (f"base_model.model.{path}.lora_{side}.weight", getattr(layer, f"lora_{side}")[name].weight)
            for path, layer in self.layers
            for side in ("A", "B")
        ]
        self._flatten()
        self._initialise(lora.seed)
        # AdamW updates each number by itself, so one flat parameter steps as its many views would.
        self._optimizer = torch.optim.AdamW([self.weights], fused=True)
        self.has_gradient = False
        self.step = 0

    def _flatten(self) -> None:
        size = sum(parameter.numel() for _, parameter in self._parameters)
        device = self._parameters[0][1].device
        self.weights = torch.nn.Parameter(torch.zeros(size, dtype=torch.float32, device=device), requires_grad=False)
        self.gradient = torch.zeros(size, dtype=torch.float32, device=device)
        begin = 0
        for _, parameter in self._parameters:
            end = begin + parameter.numel()
            parameter.data = self.weights.data[begin:end].view(parameter.shape)
            parameter.requires_grad_(True)
            parameter.grad = self.gradient[begin:end].view(parameter.shape)
            begin = end

    def _initialise(self, seed: int) -> None:
        """PEFT's own initial values (A Kaiming-uniform, B zero), drawn in float32 from `seed`."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for _, layer in self.layers:
                layer.reset_lora_parameters(self.name, init_lora_weights=True)

    def remove(self) -> None:
        """Takes the adapter out of the model."""
        for _, layer in self.layers:
            layer.delete_adapter(self.name)

    def facts(self) -> AdapterFacts:
        return AdapterFacts(self.target_modules, num_modules=len(self.layers), num_parameters=self.weights.numel())

    def optim_step(self, adam: AdamParams) -> dict[str, float]:
        """Clips, steps AdamW, clears the gradient. Raises before anything is applied."""
        if not self.has_gradient:
            raise EmptyGradientError("optim_step with no gradient: call forward_backward first.")
        grad_norm = torch.linalg.vector_norm(self.gradient, dtype=torch.float64).item()
        if not math.isfinite(grad_norm):
            self.clear_gradient()
            raise SessionError(
                f"The gradient's norm is {grad_norm}: nothing was applied and the gradient was dropped. "
                "Look for extreme advantages or logprobs in the last batches."
            )
        if adam.grad_clip_norm and grad_norm > adam.grad_clip_norm:
            self.gradient.mul_(adam.grad_clip_norm / grad_norm)
        self._optimizer.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        self.weights.grad = self.gradient
        self._optimizer.step()
        self.weights.grad = None
        self.clear_gradient()
        self.step += 1
        return {"grad_norm:max": grad_norm, "step:max": float(self.step)}

    def clear_gradient(self) -> None:
        self.gradient.zero_()
        self.has_gradient = False

    def export(self, dtype: torch.dtype) -> AdapterWeights:
        """A copy of the weights in `dtype`, the base model's."""
        flat = self.weights.detach().to(dtype=dtype, copy=True).cpu()
        return AdapterWeights(
            flat=(flat.view(torch.uint16) if dtype == torch.bfloat16 else flat).numpy(),
            entries=tuple((name, tuple(parameter.shape)) for name, parameter in self._parameters),
            rank=self.lora.rank,
            alpha=self.lora.alpha,
            target_modules=self.target_modules,
            num_modules=len(self.layers),
        )
