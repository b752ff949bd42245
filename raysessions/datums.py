"""Datums made from what a loop has at hand; they do the shift between tokens and targets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raysessions.errors import DatumError
from raysessions.types import Datum, ModelInput, SampledSequence


def datum_for_supervised(tokens: Sequence[int], weights: Sequence[float]) -> Datum:
    """A datum for `cross_entropy` from a whole sequence. `weights[i]` is the weight of predicting `tokens[i]`
    (so `weights[0]` is not used): 0 on the prompt and 1 on the answer is usual."""
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(tokens[1:], dtype=np.int64),
            "weights": np.asarray(weights[1:], dtype=np.float32),
        },
    )


def datum_for_rl(prompt_tokens: Sequence[int], sequence: SampledSequence, advantage: float | Sequence[float]) -> Datum:
    """A datum for the policy-gradient losses from a prompt and one sampled continuation. `advantage` is one number, or
    one per sampled token. Prompt positions have weight 0."""
    prompt = list(prompt_tokens)
    num_prompt, num_new = len(prompt), len(sequence.tokens)
    advantages = np.asarray(advantage, dtype=np.float32)
    if not num_prompt or not num_new:
        raise DatumError(f"A datum needs a prompt and new tokens; this one has {num_prompt} and {num_new}.")
    if advantages.shape not in ((), (num_new,)):
        raise DatumError(f"advantage has shape {advantages.shape}: give one number, or one for each of {num_new} new tokens.")
    tokens = prompt + list(sequence.tokens)
    before = np.zeros(num_prompt - 1, dtype=np.float32)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(tokens[1:], dtype=np.int64),
            "logprobs": np.concatenate([before, np.asarray(sequence.logprobs, dtype=np.float32)]),
            "advantages": np.concatenate([before, np.broadcast_to(advantages, (num_new,))]),
            "weights": np.concatenate([before, np.ones(num_new, dtype=np.float32)]),
        },
    )
