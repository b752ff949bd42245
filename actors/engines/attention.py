"""Attention over packed sequences, one call per segment.

transformers keeps packed sequences apart with a dense [T, T] mask, whose cost grows with the square of the row. A call
per sequence needs no mask and does only the work of each: on two CPU cores 415 against 312 tokens/s (SmolLM2-135M,
sequences of 256 tokens).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_utils import AttentionInterface

from raysessions.actors.maths.rows import Segment

NAME = "raysessions_packed"


def register() -> str:
    """Makes the function known to transformers; returns the `attn_implementation` to load a model with."""
    AttentionInterface.register(NAME, packed_attention)
    return NAME


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: list[Segment] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Shapes: query (B, heads, T, D), key and value (B, kv_heads, T, D); returns (B, T, heads, D).

    `segments` cover the row in order; None means that a row is one sequence.
    """
    parts = []
    for segment in segments or [Segment(0, query.shape[2])]:
        own = slice(segment.begin, segment.end)
        mask = _mask(segment, sliding_window, query.device)
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, own],
                _seen(key, segment),
                _seen(value, segment),
                attn_mask=mask,
                is_causal=mask is None and segment.end - segment.begin > 1,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _seen(states: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Keys or values that the segment's tokens may look at: the prefix, then their own."""
    own = states[:, :, segment.begin : segment.end]
    if segment.prefix is None:
        return own
    begin, end = segment.prefix
    return torch.cat([states[:, :, begin:end], own], dim=2)


def _mask(segment: Segment, window: int | None, device: torch.device) -> torch.Tensor | None:
    """True where a position may look: itself, what is before it and, with a window, not further back than that.
    None where plain causal attention says the same."""
    num_own = segment.end - segment.begin
    num_prefix = 0 if segment.prefix is None else segment.prefix[1] - segment.prefix[0]
    num_seen = num_prefix + num_own
    is_windowed = window is not None and num_seen > window
    if not num_prefix and not is_windowed:
        return None
    mask = torch.ones(num_own, num_seen, dtype=torch.bool, device=device).tril_(num_prefix)
    return mask.triu_(num_prefix - window + 1) if is_windowed and window is not None else mask
