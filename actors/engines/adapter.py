"""One session's LoRA adapter: its weights, its gradient and its AdamW state, each one flat float32 buffer.

The parameters inside the model are views of the weights, and in backward their `.grad` are views of one scratch buffer that
all sessions of a rank use in turn. So an optimizer step, a clip, a reduction over ranks, a copy or a save is one operation
over one array whatever the number of layers, and a failed backward touches nothing that counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer

from raysessions.actors.engines import lora_linear
from raysessions.actors.engines.process_group import ProcessGroup
from raysessions.actors.engines.sharded_adamw import ShardedAdamW
from raysessions.actors.protocol import AdapterFacts, RankState
from raysessions.adapter_weights import AdapterWeights, Entries, flatten, from_flat
from raysessions.config import LoraConfig
from raysessions.errors import EmptyGradientError
from raysessions.training_state import TrainingState
from raysessions.types import AdamParams


def activate(model: torch.nn.Module, name: str) -> None:
    """Makes the model's forward use the adapter `name` and no other, also in layers that only others adapt."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_adapter(name)


class Adapter:
    """A LoRA adapter named `name`, injected into `model` by PEFT.

    ZeRO stage 0 keeps gradient and optimizer state whole on every rank, stage 1 splits the state, stages 2 and 3 also the
    gradient. The weights are whole everywhere: the forward needs them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        name: str,
        lora: LoraConfig,
        target_modules: tuple[str, ...],
        group: ProcessGroup,
        zero_stage: int,
    ) -> None:
        self.name = name
        self.lora = lora
        self.target_modules = target_modules
        self._group = group
        self._zero_stage = zero_stage
        config = PeftLoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(target_modules), lora_dropout=0.0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are what we want
            inject_adapter_in_model(config, model, adapter_name=name)
        self.layers: list[tuple[str, LoraLayer]] = [
            (path, module) for path, module in model.named_modules() if isinstance(module, LoraLayer) and name in module.lora_A
        ]
        for _, layer in self.layers:
            lora_linear.install(layer)
        self._parameters = [
            (f"base_model.model.{path}.lora_{side}.weight", getattr(layer, f"lora_{side}")[name].weight)
            for path, layer in self.layers
            for side in ("A", "B")
        ]
        self.num_parameters = sum(parameter.numel() for _, parameter in self._parameters)
        self.weights = self._flatten()
        """float32, shape (num_parameters, and up to a multiple of the ranks): the same on every rank."""
        self._initialise(lora.seed)
        self._optimizer = ShardedAdamW(self.weights, group, is_sharded=zero_stage >= 1)
        self.gradient = torch.zeros_like(group.own_slice(self.weights) if zero_stage >= 2 else self.weights)
        """What counts only while `has_gradient`: this rank's part of the sum, from stage 2 on its slice of the whole sum."""
        self.has_gradient = False
        self.step = 0

    def _flatten(self) -> torch.Tensor:
        """Moves the parameters into one buffer, of which they become views."""
        device = self._parameters[0][1].device
        weights = torch.zeros(_round_up(self.num_parameters, self._group.world_size), dtype=torch.float32, device=device)
        for parameter, view in self._views(weights):
            parameter.data = view
            parameter.requires_grad_(True)
        return weights

    def _views(self, flat: torch.Tensor) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        begin = 0
        for _, parameter in self._parameters:
            end = begin + parameter.numel()
            yield parameter, flat[begin:end].view(parameter.shape)
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
        return AdapterFacts(self.target_modules, num_modules=len(self.layers), num_parameters=self.num_parameters)

    def collect_into(self, scratch: torch.Tensor) -> None:
        """Until `stop_collecting`, backward adds to `scratch`, as long as `weights`, which is cleared first."""
        scratch.zero_()
        for parameter, view in self._views(scratch):
            parameter.grad = view

    def stop_collecting(self) -> None:
        for _, parameter in self._parameters:
            parameter.grad = None

    def accumulate(self, scratch: torch.Tensor) -> None:
        """Adds what backward left in `scratch` to the gradient."""
        part = self._group.sum_slices(scratch) if self._zero_stage >= 2 else scratch
        if self.has_gradient:
            self.gradient.add_(part)
        else:
            self.gradient.copy_(part)
        self.has_gradient = True

    def optim_step(self, adam: AdamParams) -> dict[str, float]:
        """Sums the gradient over the ranks, clips, steps AdamW, drops the gradient. Raises before anything is applied."""
        if not self.has_gradient:
            raise EmptyGradientError("optim_step with no gradient: call forward_backward first.")
        self.has_gradient = False
        grad_norm = self._optimizer.step(self._summed_gradient(), adam)
        self.step += 1
        return {"grad_norm:max": grad_norm, "step:max": float(self.step)}

    def _summed_gradient(self) -> torch.Tensor:
        if self._zero_stage == 0:
            return self._group.sum(self.gradient)
        return self._group.sum_slices(self.gradient) if self._zero_stage == 1 else self.gradient

    def state(self) -> RankState:
        """This rank's part of all that training goes on from. The arrays are views until the next operation."""
        speaks = self._group.world_rank == 0
        has_moments = speaks or self._zero_stage >= 1
        return RankState(
            weights=self.export(torch.float32) if speaks else None,
            moments={name: part.cpu().numpy() for name, part in self._optimizer.moments().items()} if has_moments else {},
            gradient=self.gradient.cpu().numpy() if self.has_gradient else None,
            step=self.step,
        )

    def load(self, state: TrainingState, gradient: np.ndarray | None) -> None:
        """Goes on from `state`, on any number of ranks. `gradient` is this rank's, as `state()` gave it. Raises
        `CheckpointMismatchError`, and then nothing has changed."""
        weights = self._whole(flatten(from_flat(state.weights), self._entries()))
        moments = {
            name: self._whole(flatten(from_flat(state.weights, moment), self._entries()))
            for name, moment in state.moments.items()
        }
        self.weights.copy_(weights)
        self._optimizer.load(moments, state.step)
        self.step = state.step
        self.has_gradient = gradient is not None
        if gradient is not None:
            self.gradient.copy_(torch.from_numpy(np.array(gradient)))

    def _entries(self) -> Entries:
        return tuple((name, tuple(parameter.shape)) for name, parameter in self._parameters)

    def _whole(self, flat: np.ndarray) -> torch.Tensor:
        """As long as `weights`."""
        whole = torch.zeros(len(self.weights), dtype=torch.float32)
        whole[: self.num_parameters] = torch.from_numpy(flat)
        return whole

    def export(self, dtype: torch.dtype) -> AdapterWeights:
        """A copy of the weights in `dtype`, the base model's."""
        flat = self.weights[: self.num_parameters].to(dtype=dtype, copy=True).cpu()
        return AdapterWeights(
            flat=(flat.view(torch.uint16) if dtype == torch.bfloat16 else flat).numpy(),
            entries=self._entries(),
            rank=self.lora.rank,
            alpha=self.lora.alpha,
            target_modules=self.target_modules,
            num_modules=len(self.layers),
        )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
