"""Datums for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raysessions import LOSSES, Datum, SampledSequence, datum_for_rl, datum_for_supervised
from raysessions.operations import Loss

VOCAB = 259
"""Of the tiny model."""


def loss(name: str = "cross_entropy", **config: float) -> Loss:
    """A built-in loss as the clients send it."""
    return Loss(name, {**LOSSES[name].config, **config}, LOSSES[name].gates)


def supervised(lengths: Sequence[int], seed: int = 0) -> list[Datum]:
    """One random datum of each length, with random weights, some of them negative and some 0."""
    rng = np.random.default_rng(seed)
    return [
        datum_for_supervised(rng.integers(3, VOCAB, n + 1).tolist(), rng.choice([0.0, 1.0, 0.5, -0.3], n + 1).tolist())
        for n in lengths
    ]


def group(prompt_length: int, answer_lengths: Sequence[int], seed: int = 0) -> list[Datum]:
    """Answers to one random prompt, for the policy-gradient losses."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, VOCAB, prompt_length).tolist()
    return [
        datum_for_rl(
            prompt,
            SampledSequence(rng.integers(3, VOCAB, n).tolist(), rng.uniform(-6, -4, n).tolist(), "length"),
            advantage=float(rng.normal()),
        )
        for n in answer_lengths
    ]


def arrays(datum: Datum) -> dict[str, np.ndarray]:
    """The loss inputs of a datum as plain arrays, and its tokens."""
    inputs = {key: np.asarray(value) for key, value in datum.loss_fn_inputs.items()}
    return {"tokens": np.asarray(datum.model_input.to_ints()), **inputs}
