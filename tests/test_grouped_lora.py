"""The grouped LoRA products on CPU against vLLM's stock ones and a plain loop."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from raysessions.actors.engines.grouped_lora import GroupedPunicaWrapper

SLOTS, RANK, N_IN = 3, 8, 32
WIDTHS = (48, 16, 16)
"""Of a fused qkv layer."""


def _wrappers(adapter_of_token: tuple[int, ...], is_prefill: bool) -> list[PunicaWrapperCPU]:
    """Stock and grouped, told which adapter (0: none) each token uses. Slot i holds adapter i + 1."""
    wrappers = []
    for cls in (PunicaWrapperCPU, GroupedPunicaWrapper):
        wrapper = cls(max_num_batched_tokens=64, max_batches=64, device="cpu")
        mapping = LoRAMapping(adapter_of_token, adapter_of_token, is_prefill=is_prefill)
        wrapper.update_metadata(mapping, [1, 2, 3], SLOTS + 1, 100)
        wrappers.append(wrapper)
    return wrappers


def _weights(dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    a = tuple(torch.randn(SLOTS, 1, RANK, N_IN, generator=generator).to(dtype) for _ in WIDTHS)
    b = tuple(torch.randn(SLOTS, 1, width, RANK, generator=generator).to(dtype) for width in WIDTHS)
    return a, b


def _by_hand(x, y, adapters, a, b) -> torch.Tensor:
    """Token by token in float32; a token without adapter is left alone."""
    result, offset = y.float().clone(), 0
    for a_i, b_i, width in zip(a, b, WIDTHS, strict=True):
        for token, adapter in enumerate(adapters):
            if adapter:
                slot = adapter - 1
                product = b_i[slot, 0].float() @ (a_i[slot, 0].float() @ x[token].float())
                result[token, offset : offset + width] += product
        offset += width
    return result


@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("adapters", [(2,) * 6, (1, 1, 3, 3, 2, 2), (3, 1, 2, 1, 3, 2)])
def test_linear_layers_equal_stock_where_every_token_has_an_adapter(adapters, is_prefill):
    x, y = torch.randn(len(adapters), N_IN), torch.randn(len(adapters), sum(WIDTHS))
    a, b = _weights(torch.float32)
    outputs = []
    for wrapper in _wrappers(adapters, is_prefill):
        out = y.clone()
        wrapper.add_lora_linear(out, x, a, b, 1.0, WIDTHS)
        outputs.append(out)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(outputs[1], _by_hand(x, y, adapters, a, b), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("adapters", [(0,) * 5, (0, 1, 0, 3, 2), (1, 1, 0, 0, 0)])
def test_tokens_without_adapter_are_left_alone(adapters):
    """Stock reads slot −1, the last one, for them while decoding; so the reference is the plain loop."""
    x, y = torch.randn(len(adapters), N_IN), torch.randn(len(adapters), sum(WIDTHS))
    a, b = _weights(torch.float32)
    for is_prefill in (True, False):
        _, grouped = _wrappers(adapters, is_prefill)
        out = y.clone()
        grouped.add_lora_linear(out, x, a, b, 1.0, WIDTHS)
        torch.testing.assert_close(out, _by_hand(x, y, adapters, a, b), rtol=1e-5, atol=1e-4)


def test_bfloat16_is_within_rounding_of_the_float32_product():
    adapters = (1, 2, 3, 1)
    x, y = torch.randn(4, N_IN).bfloat16(), torch.zeros(4, sum(WIDTHS)).bfloat16()
    a, b = _weights(torch.bfloat16)
    _, grouped = _wrappers(adapters, False)
    out = y.clone()
    grouped.add_lora_linear(out, x, a, b, 1.0, WIDTHS)
    torch.testing.assert_close(out.float(), _by_hand(x, y, adapters, a, b), rtol=2e-2, atol=0.5)


def test_shrink_and_expand_in_two_calls_equal_stock():
    adapters = (2, 1, 1, 3)
    x, y = torch.randn(4, N_IN), torch.randn(4, sum(WIDTHS))
    a, b = _weights(torch.float32)
    outputs = []
    for wrapper in _wrappers(adapters, False):
        buffers = tuple(torch.zeros(4, RANK) for _ in WIDTHS)
        out = y.clone()
        wrapper.add_shrink(buffers, x, a, 0.5)
        wrapper.add_expand(out, buffers, b, WIDTHS, add_inputs=True)
        outputs.append(out)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-4)


def test_logits_equal_stock():
    adapters = (2, 1, 3)
    x, y = torch.randn(3, N_IN), torch.randn(3, 48)
    a, b = _weights(torch.float32)
    outputs = []
    for wrapper in _wrappers(adapters, False):
        out = y.clone()
        wrapper.add_lora_logits(out, x, a[0], b[0], 1.0)
        outputs.append(out)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-4)
