"""Parts of a flat batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raysessions.batch import Batch


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
