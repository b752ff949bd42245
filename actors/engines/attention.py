"""Attention over packed rows: each segment sees its own tokens and its prefix, nothing else.

transformers keeps packed sequences apart with a dense [T, T] mask, whose cost grows with the square of the row. Here long
segments get a call each, and on CPU short ones are padded into a batch and multiplied together: torch's fused CPU kernel
has a fixed cost per head and call that dwarfs a short segment. Measured forward and backward on two cores (9 heads of 64,
bfloat16): 48 answers of 14 tokens to prompts of 37, 57 ms one by one and 3.7 ms padded; 16 × 128, 74 and 23 ms;
4 × 512, 108 and 168 ms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.modeling_utils import AttentionInterface

from raysessions.actors.maths.rows import Segment

NAME = "raysessions_packed"

PADDED_UP_TO = 256
"""Tokens that a segment sees, up to which it goes into a padded batch on CPU."""
PADDING = 1.25
"""Segments share a batch while the longest sees at most this many times the shortest."""


def register() -> str:
    """Makes the function known to transformers; returns the `attn_implementation` to load a model with."""
    AttentionInterface.register(NAME, packed_attention)
    return NAME


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Segments of similar length, padded to the same. N segments of at most L tokens that see at most S."""

    query_index: torch.Tensor | slice
    """Where the queries stand in the row; padding points anywhere. int64, shape (N · L,), or a slice that says the same."""
    key_index: torch.Tensor | slice
    """The same for keys and values. int64, shape (N · S,), or a slice."""
    mask: torch.Tensor
    """0 where a query may look and −inf elsewhere. float32, shape (N, 1, L, S)."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one row is attended to; made once, used by every layer."""

    single: list[Segment]
    padded: list[PaddedBatch]
    slot: torch.Tensor | slice
    """For each token of the row, where its output stands in the outputs of `single` and `padded`, end to end. int64."""


def plan_attention(segments: list[Segment], device: torch.device) -> AttentionPlan:
    """Decides which segments are padded together."""
    is_short = [device.type == "cpu" and _num_seen(segment) <= PADDED_UP_TO for segment in segments]
    single = [segment for segment, short in zip(segments, is_short, strict=True) if not short]
    short = [segment for segment, short in zip(segments, is_short, strict=True) if short]
    groups = list(_similar(short))
    padded = [_pad(group, device) for group in groups]
    slot = np.empty(segments[-1].end, dtype=np.int64)
    begin = 0
    for segment in single:
        slot[segment.begin : segment.end] = begin + np.arange(_num_own(segment))
        begin += _num_own(segment)
    for group in groups:
        longest = max(map(_num_own, group))
        for segment in group:
            slot[segment.begin : segment.end] = begin + np.arange(_num_own(segment))
            begin += longest
    return AttentionPlan(single, padded, _index(slot, device))


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    plan: AttentionPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Shapes: query (1, heads, T, D), key and value (1, kv_heads, T, D); returns (1, T, heads, D). Without a plan, each row
    of the batch is one sequence."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if plan is None:
        whole = Segment(0, query.shape[2])
        return _attend(query, key, value, whole, scale, sliding_window).transpose(1, 2).contiguous(), None
    outputs = [_attend(query, key, value, segment, scale, sliding_window) for segment in plan.single]
    outputs += [_attend_padded(query, key, value, batch, scale, sliding_window) for batch in plan.padded]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output[:, :, plan.slot].transpose(1, 2).contiguous(), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: Segment, scale: float, window: int | None
) -> torch.Tensor:
    """One segment by torch's fused kernel."""
    mask = _mask(segment, window, query.device)
    return F.scaled_dot_product_attention(
        query[:, :, segment.begin : segment.end],
        _seen(key, segment),
        _seen(value, segment),
        attn_mask=mask,
        is_causal=mask is None and _num_own(segment) > 1,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_padded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PaddedBatch, scale: float, window: int | None
) -> torch.Tensor:
    """A padded batch by plain matrix products; heads that share keys are one matrix. Returns (1, heads, N · L, D)."""
    num_segments, _, length, num_seen = batch.mask.shape
    num_heads, head_size = query.shape[1], query.shape[3]
    num_kv = key.shape[1]
    mask = batch.mask if window is None or window >= num_seen else batch.mask + _window_mask(batch.mask, window)
    q = query[0, :, batch.query_index].view(num_kv, num_heads // num_kv, num_segments, length, head_size).transpose(1, 2)
    q = q.reshape(num_kv, num_segments, -1, head_size)
    k = key[0, :, batch.key_index].view(num_kv, num_segments, num_seen, head_size)
    v = value[0, :, batch.key_index].view(num_kv, num_segments, num_seen, head_size)
    # In float32, as the fused kernels do it: scores rounded to bfloat16 are off by several hundredths.
    with torch.autocast(query.device.type, enabled=False):
        scores = (q.float() @ k.float().transpose(-1, -2)).view(num_kv, num_segments, -1, length, num_seen)
    weights = (scores * scale + mask).softmax(-1).to(v.dtype).view(num_kv, num_segments, -1, num_seen)
    output = (weights @ v).view(num_kv, num_segments, -1, length, head_size).transpose(1, 2)
    return output.reshape(1, num_heads, num_segments * length, head_size)


def _num_own(segment: Segment) -> int:
    return segment.end - segment.begin


def _num_prefix(segment: Segment) -> int:
    return 0 if segment.prefix is None else segment.prefix[1] - segment.prefix[0]


def _num_seen(segment: Segment) -> int:
    return _num_prefix(segment) + _num_own(segment)


def _similar(segments: list[Segment]) -> Iterable[list[Segment]]:
    """Groups in which nobody sees more than PADDING times what another sees, or has more tokens of its own."""
    group: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: (_num_seen(segment), _num_own(segment))):
        if group and not _fits(group, segment):
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


def _fits(group: list[Segment], segment: Segment) -> bool:
    own = [*map(_num_own, group), _num_own(segment)]
    slack = 16  # lengths that differ by a few tokens are similar, however short
    return _num_seen(segment) <= PADDING * _num_seen(group[0]) + slack and max(own) <= PADDING * min(own) + slack


def _pad(segments: list[Segment], device: torch.device) -> PaddedBatch:
    length, num_seen = max(map(_num_own, segments)), max(map(_num_seen, segments))
    query_index = np.zeros((len(segments), length), dtype=np.int64)
    key_index = np.zeros((len(segments), num_seen), dtype=np.int64)
    mask = np.full((len(segments), 1, length, num_seen), -np.inf, dtype=np.float32)
    for i, segment in enumerate(segments):
        own = np.arange(segment.begin, segment.end)
        query_index[i, : len(own)] = own
        key_index[i, : _num_seen(segment)] = np.concatenate([np.arange(*(segment.prefix or (0, 0))), own])
        rows, columns = np.tril_indices(len(own), _num_prefix(segment), _num_seen(segment))
        mask[i, 0, rows, columns] = 0.0
        mask[i, 0, len(own) :, 0] = 0.0  # a padding query sees something, or its softmax is not a number
    return PaddedBatch(
        _index(query_index.ravel(), device),
        _index(key_index.ravel(), device),
        torch.from_numpy(mask).to(device),
    )


def _index(index: np.ndarray, device: torch.device) -> torch.Tensor | slice:
    """A slice where the places follow each other: it costs no copy, forward or backward."""
    begin = int(index[0])
    if np.array_equal(index, np.arange(begin, begin + len(index))):
        return slice(begin, begin + len(index))
    return torch.from_numpy(index).to(device)


def _window_mask(mask: torch.Tensor, window: int) -> torch.Tensor:
    """−inf where a key is `window` or more positions behind: the last key that a query may see stands at its position."""
    position = (mask == 0).cumsum(-1).amax(-1, keepdim=True) - 1
    behind = position - torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(behind >= window, -torch.inf, 0.0)


def _seen(states: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Keys or values that the segment's tokens may look at: the prefix, then their own."""
    own = states[:, :, segment.begin : segment.end]
    if segment.prefix is None:
        return own
    begin, end = segment.prefix
    return torch.cat([states[:, :, begin:end], own], dim=2)


def _mask(segment: Segment, window: int | None, device: torch.device) -> torch.Tensor | None:
    """True where a position may look; None where plain causal attention says the same."""
    num_own, num_prefix, num_seen = _num_own(segment), _num_prefix(segment), _num_seen(segment)
    is_windowed = window is not None and num_seen > window
    if not num_prefix and not is_windowed:
        return None
    mask = torch.ones(num_own, num_seen, dtype=torch.bool, device=device).tril_(num_prefix)
    return mask.triu_(num_prefix - window + 1) if is_windowed and window is not None else mask
