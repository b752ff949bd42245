"""The forward of a linear layer with LoRA, in place of PEFT's.

PEFT casts the layer's input to the adapter's float32, which autocast casts back, and keeps both copies for backward. Here the
product is made in the layer's own dtype, one input is kept, and the addition is part of a matrix product.
"""

from __future__ import annotations

import functools

import torch
from peft.tuners.lora import LoraLayer


def install(layer: LoraLayer) -> None:
    """Gives the layer this forward. Safe to call again."""
    layer.forward = functools.partial(_forward, layer)


def _forward(layer: LoraLayer, x: torch.Tensor) -> torch.Tensor:
    base = layer.base_layer(x)
    name = layer.active_adapters[0]
    if name not in layer.lora_A:
        return base
    return _AddLora.apply(base, x, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])


class _AddLora(torch.autograd.Function):
    """base + scaling · x Aᵀ Bᵀ, in the dtype of `base`. Suffixes: T tokens, I inputs, O outputs, R LoRA rank."""

    @staticmethod
    def forward(ctx, base, x, a, b, scaling):
        base_TO, x_TI = base.reshape(-1, base.shape[-1]), x.reshape(-1, x.shape[-1]).to(base.dtype)
        a_RI, b_OR = a.to(base.dtype), b.to(base.dtype)
        inner_TR = torch.mm(x_TI, a_RI.T)
        ctx.save_for_backward(x_TI, inner_TR, a, b)
        ctx.scaling, ctx.x_dtype, ctx.x_shape = scaling, x.dtype, x.shape
        return torch.addmm(base_TO, inner_TR, b_OR.T, alpha=scaling).view(base.shape)

    @staticmethod
    def backward(ctx, grad):
        x_TI, inner_TR, a, b = ctx.saved_tensors
        a_RI, b_OR = a.to(x_TI.dtype), b.to(x_TI.dtype)
        grad_TO = grad.reshape(-1, grad.shape[-1])
        # The scale on the small matrix, once for all three.
        inner_grad_TR = torch.mm(grad_TO, b_OR).mul_(ctx.scaling)
        grad_a = torch.mm(inner_grad_TR.T, x_TI).to(a.dtype)
        grad_b = torch.mm(grad_TO.T, inner_TR).to(b.dtype).mul_(ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[1]:
            grad_x = torch.mm(inner_grad_TR, a_RI).view(ctx.x_shape).to(ctx.x_dtype)
        return grad, grad_x, grad_a, grad_b, None
