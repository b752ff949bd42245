"""Attention over packed rows against dense softmax attention with a mask made token by token."""

import pytest
import torch

from raysessions.actors.engines.attention import PADDED_UP_TO, packed_attention, plan_attention
from raysessions.actors.maths.rows import Segment

CPU = torch.device("cpu")


def row_of(*runs: int | tuple[int, list[int]]) -> list[Segment]:
    """Segments end to end: a length, or a prompt's length with those of the answers that continue it."""
    segments: list[Segment] = []
    end = 0
    for run in runs:
        first, answers = (run, []) if isinstance(run, int) else run
        prompt = (end, end + first)
        segments.append(Segment(*prompt))
        end += first
        for length in answers:
            segments.append(Segment(end, end + length, prompt))
            end += length
    return segments


ROWS = {
    "one token": row_of(1),
    "short segments": row_of(1, 2, 3, 17, 40, 64, 65, 130),
    "at the border of padding": row_of(PADDED_UP_TO - 1, PADDED_UP_TO, PADDED_UP_TO + 1),
    "long and short": row_of(300, 5, 290, 1, 120),
    "short prompts with answers": row_of((37, [14, 14, 3, 1, 20]), (16, [5, 90]), 8),
    "long prompts with answers": row_of((280, [1, 30, 60]), (250, [6, 7]), (100, [200])),
}


def dense_mask(segments: list[Segment], window: int | None) -> torch.Tensor:
    """True where the row's token of the first axis may look at that of the second."""
    mask = torch.zeros(segments[-1].end, segments[-1].end, dtype=torch.bool)
    for segment in segments:
        sequence = list(range(*(segment.prefix or (0, 0))))
        for query in range(segment.begin, segment.end):
            sequence.append(query)
            for key in sequence if window is None else sequence[-window:]:
                mask[query, key] = True
    return mask


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def random_states(num_tokens: int, num_heads: int, num_kv: int, num_rows: int = 1) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient that comes from above."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_heads, num_tokens), (num_kv, num_tokens), (num_kv, num_tokens), (num_tokens, num_heads)]
    return [torch.randn(num_rows, *shape, 8, generator=generator) for shape in shapes]


def leaves(states: list[torch.Tensor]) -> list[torch.Tensor]:
    return [state.clone().requires_grad_() for state in states]


def assert_same_with_gradients(
    ours: torch.Tensor,
    our_leaves: list[torch.Tensor],
    theirs: torch.Tensor,
    their_leaves: list[torch.Tensor],
    above: torch.Tensor,
) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours.backward(above)
    theirs.backward(above)
    for our_leaf, their_leaf in zip(our_leaves, their_leaves, strict=True):
        torch.testing.assert_close(our_leaf.grad, their_leaf.grad, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 1, 7, 50, 270])
@pytest.mark.parametrize("segments", ROWS.values(), ids=ROWS.keys())
def test_packed_attention_equals_dense_attention_in_value_and_gradient(segments: list[Segment], window: int | None):
    *states, above = random_states(segments[-1].end, num_heads=4, num_kv=2)
    ours, theirs = leaves(states), leaves(states)
    output, weights = packed_attention(
        torch.nn.Module(), *ours, None, plan=plan_attention(segments, CPU), scaling=0.3, sliding_window=window
    )
    assert weights is None
    assert_same_with_gradients(output, ours, dense_attention(*theirs, dense_mask(segments, window), 0.3), theirs, above)


@pytest.mark.parametrize("num_kv", [1, 2, 6])
def test_query_heads_share_the_keys_of_their_group(num_kv: int):
    segments = row_of((40, [9, 30]), 280, 12)
    *states, above = random_states(segments[-1].end, num_heads=6, num_kv=num_kv)
    ours, theirs = leaves(states), leaves(states)
    output, _ = packed_attention(torch.nn.Module(), *ours, None, plan=plan_attention(segments, CPU))
    assert_same_with_gradients(output, ours, dense_attention(*theirs, dense_mask(segments, None), 8**-0.5), theirs, above)


def test_both_paths_are_taken_by_the_rows_above():
    plans = {name: plan_attention(segments, CPU) for name, segments in ROWS.items()}
    assert {name: len(plan.single) for name, plan in plans.items()} == {
        "one token": 0,
        "short segments": 0,
        "at the border of padding": 1,
        "long and short": 2,
        "short prompts with answers": 0,
        "long prompts with answers": 6,
    }
    assert [name for name, plan in plans.items() if not plan.padded] == []


def test_without_a_plan_each_row_of_the_batch_is_one_sequence():
    *states, above = random_states(20, num_heads=4, num_kv=2, num_rows=3)
    ours, theirs = leaves(states), leaves(states)
    output, _ = packed_attention(torch.nn.Module(), *ours, None, sliding_window=6)
    assert_same_with_gradients(output, ours, dense_attention(*theirs, dense_mask(row_of(20), 6), 8**-0.5), theirs, above)


def test_a_segment_does_not_feel_its_neighbours():
    segments = row_of(30, (40, [12, 15]), 270)
    query, key, value, _ = random_states(segments[-1].end, num_heads=2, num_kv=1)
    plan = plan_attention(segments, CPU)
    before, _ = packed_attention(torch.nn.Module(), query, key, value, None, plan=plan)
    key[:, :, 70:82] += 5.0
    value[:, :, 70:82] -= 3.0
    after, _ = packed_attention(torch.nn.Module(), query, key, value, None, plan=plan)
    changed = (before != after).any(-1).any(-1)[0].nonzero().squeeze(-1).tolist()
    assert changed == list(range(70, 82))
