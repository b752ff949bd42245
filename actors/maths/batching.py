"""Which datums go through the model together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raysessions.batch import Batch


def plan_micro_batches(lengths: Sequence[int] | np.ndarray, max_tokens: int) -> list[list[int]]:
    """Packs datums into micro-batches of at most `max_tokens` tokens; a longer datum gets one of its own.

    First fit, longest first: within 22 % of the fewest possible (Johnson 1973), and the same plan for the same lengths.
    Returns datum indices per micro-batch, each ascending.
    """
    plan: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = int(lengths[index])
        slot = next((slot for slot, free in enumerate(room) if free >= length), None)
        if slot is None:
            plan.append([index])
            room.append(max_tokens - length)
        else:
            plan[slot].append(index)
            room[slot] -= length
    return [sorted(indices) for indices in plan]


def select(batch: Batch, indices: Sequence[int]) -> Batch:
    """The datums `indices` of `batch`, in that order, as a batch of their own (copied)."""
    at = positions(batch, indices)
    lengths = batch.lengths[list(indices)]
    return Batch(
        tokens=batch.tokens[at],
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        target_tokens=batch.target_tokens[at],
        inputs={key: column[at] for key, column in batch.inputs.items()},
    )


def positions(batch: Batch, indices: Sequence[int]) -> np.ndarray:
    """Where the tokens of the datums `indices` stand in the flat arrays. int64, in that order."""
    return np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in indices])


def position_ids(batch: Batch) -> np.ndarray:
    """Each token's place in its own datum: 0, 1, …, 0, 1, … int64, shape (num_tokens,)."""
    return np.arange(len(batch.tokens)) - np.repeat(batch.offsets[:-1], batch.lengths)
