"""LoRA on vLLM's CPU backend with one matrix product per adapter in the batch.

Stock vLLM gathers a copy of A and B for every token, which costs most of the throughput; and a token without adapter has
slot −1, which that gather reads as the last slot. Here tokens are grouped by adapter once per step, each group is
multiplied once, and tokens without adapter are left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

Group = tuple[int, torch.Tensor | None]
"""A slot of the stacked adapters, and the rows that use it; None for all rows."""


def register() -> None:
    """Makes vLLM's CPU platform use `GroupedPunicaWrapper`. Safe to call again."""
    name = f"{GroupedPunicaWrapper.__module__}.{GroupedPunicaWrapper.__qualname__}"
    type(current_platform).get_punica_wrapper = classmethod(lambda cls: name)


class GroupedPunicaWrapper(PunicaWrapperCPU):
    """vLLM's interface to batched LoRA products, see its base class for the meanings of the arguments.

    Shapes: x (tokens, in), lora_a_stacked[i] (slots, 1, rank, in), lora_b_stacked[i] (slots, 1, out, rank).
    """

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._groups = _group(self.token_lora_indices)
        self._sampler_groups = _group(self.sampler_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in self._groups:
            x_group = x if rows is None else x[rows]
            offset = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                _add(y, rows, offset, _shrink(x_group, a[slot, 0], scale), b[slot, 0])
                offset += width

    def add_shrink(self, y: Any, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...], scale: float, **_: Any) -> None:
        x = x.view(-1, x.shape[-1])
        for slot, rows in self._groups:
            x_group = x if rows is None else x[rows]
            for out, a in zip(y, lora_a_stacked, strict=True):
                product = _shrink(x_group, a[slot, 0], scale).to(out.dtype)
                out[slice(None) if rows is None else rows, : product.shape[1]] = product

    def add_expand(
        self,
        y: torch.Tensor,
        x: Any,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **_: Any,
    ) -> None:
        y = y.view(-1, y.shape[-1])
        if not add_inputs:
            y[:, offset_start : offset_start + sum(output_slices)] = 0
        for slot, rows in self._groups:
            offset = offset_start
            for h, b, width in zip(x, lora_b_stacked, output_slices, strict=True):
                _add(y, rows, offset, (h if rows is None else h[rows]).to(y.dtype), b[slot, 0])
                offset += width

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **_: Any,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in self._sampler_groups:
            hidden = _shrink(x if rows is None else x[rows], lora_a_stacked[slot, 0], scale)
            _add(y, rows, 0, hidden, lora_b_stacked[slot, 0])


def _group(indices: torch.Tensor) -> list[Group]:
    """The distinct slots ≥ 0 in `indices` with their rows."""
    slots = torch.unique(indices).tolist()
    if len(slots) == 1:
        return [(slots[0], None)] if slots[0] >= 0 else []
    return [(slot, (indices == slot).nonzero().squeeze(-1)) for slot in slots if slot >= 0]


def _shrink(x: torch.Tensor, a: torch.Tensor, scale: float) -> torch.Tensor:
    product = x.to(a.dtype) @ a.T
    return product if scale == 1.0 else product * scale


def _add(y: torch.Tensor, rows: torch.Tensor | None, offset: int, hidden: torch.Tensor, b: torch.Tensor) -> None:
    """y[rows, offset:] += hidden @ bᵀ, as wide as both have room."""
    width = min(b.shape[0], y.shape[1] - offset)
    product = (hidden.to(b.dtype) @ b[:width].T).to(y.dtype)
    if rows is None:
        y[: len(product), offset : offset + width] += product
    else:
        y[rows, offset : offset + width] += product
