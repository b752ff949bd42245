"""Do sampler and trainer agree? Their difference is the first thing to look at when a policy does not learn."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from raysessions.batch import Batch
from raysessions.datums import datum_for_supervised
from raysessions.errors import ConfigError
from raysessions.types import ForwardBackwardOutput, ModelInput, SamplingParams, as_model_input

if TYPE_CHECKING:
    from raysessions.sampling_client import SamplingClient
    from raysessions.training_client import TrainingClient

KL_BOUND = 0.1
"""Nats per token (v2, never negative) above which a warning is given. The arithmetic of vLLM and DeepSpeed differs by about
0.002 in bfloat16; a few optimizer steps between sampling and training may add some hundredths."""


class NumericsWarning(UserWarning):
    """Sampler and trainer disagree more than they should."""


def warn_of_missing_logprobs(batch: Batch) -> None:
    """Warns when a policy loss is given logprobs that are all 0: they are a placeholder, and the ratio is exp(lp)."""
    if "logprobs" not in batch.inputs or "advantages" not in batch.inputs:
        return
    counts = batch.inputs["advantages"] * batch.inputs.get("weights", 1.0) != 0
    if counts.any() and not batch.inputs["logprobs"][counts].any():
        warnings.warn(
            "All `logprobs` of the trained tokens are 0. Give the sampler's (SampledSequence.logprobs): the importance ratio "
            "is taken against them.",
            NumericsWarning,
            stacklevel=4,
        )


def warn_of_divergence(output: ForwardBackwardOutput) -> None:
    """Warns when the tokens of a policy loss were far from likely under the model that trains on them."""
    kl = output.metrics.get("kl_sample_train_v2:mean", 0.0)
    if kl > KL_BOUND:
        warnings.warn(
            f"The sampler's and the trainer's logprobs differ: KL {kl:.3g} nats per token (above {KL_BOUND}). Are the "
            "samples from another version or model, or many steps old? `diagnostics.compare_logprobs` shows where.",
            NumericsWarning,
            stacklevel=3,
        )


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """One sampled token under both."""

    prompt_index: int
    position: int
    """In prompt and sample together, from 0."""
    token: int
    text: str
    sampler_logprob: float
    """Nats."""
    trainer_logprob: float

    @property
    def difference(self) -> float:
        """Trainer minus sampler."""
        return self.trainer_logprob - self.sampler_logprob


@dataclass(frozen=True, slots=True)
class LogprobComparison:
    """What `compare_logprobs` returns."""

    num_tokens: int
    kl_v1: float
    """Mean of sampler − trainer, nats: estimates KL(sampler ‖ trainer), may come out negative."""
    kl_v2: float
    """Half the mean square of the difference, nats: never negative."""
    mean_abs: float
    max_abs: float
    """The largest |difference| of one token, nats."""
    worst: tuple[TokenDifference, ...]
    """The tokens that differ most, worst first."""

    def __str__(self) -> str:
        head = (
            f"sampler against trainer over {self.num_tokens} tokens: KL v1 {self.kl_v1:+.2e}, v2 {self.kl_v2:.2e}, "
            f"|difference| mean {self.mean_abs:.2e}, max {self.max_abs:.2e} nats"
        )
        rows = [
            f"  prompt {token.prompt_index:>3}  position {token.position:>5}  {token.text!r:<14}"
            f"  sampler {token.sampler_logprob:9.4f}  trainer {token.trainer_logprob:9.4f}  {token.difference:+.4f}"
            for token in self.worst
        ]
        return "\n".join([head, *rows])


def compare_logprobs(
    training: TrainingClient,
    sampling: SamplingClient,
    prompts: Sequence[ModelInput | Sequence[int]],
    *,
    max_tokens: int = 64,
    num_worst: int = 10,
    seed: int | None = 0,
) -> LogprobComparison:
    """Samples once from each prompt, asks the trainer for the logprobs of the same tokens, prints and returns how far the
    two are apart.

    Right after a save they differ by arithmetic only. Warns (`NumericsWarning`) when the KL is above `KL_BOUND`.
    """
    if not prompts:
        raise ConfigError("compare_logprobs needs at least one prompt.")
    inputs = [as_model_input(prompt) for prompt in prompts]
    params = SamplingParams(max_tokens=max_tokens, seed=seed)
    futures = [sampling.sample(prompt, sampling_params=params) for prompt in inputs]
    sequences = [future.result().sequences[0] for future in futures]
    pairs = list(zip([prompt.to_ints() for prompt in inputs], sequences, strict=True))
    data = [datum_for_supervised(prompt + sequence.tokens, [0.0] * len(prompt + sequence.tokens)) for prompt, sequence in pairs]
    outputs = training.forward(data).result().loss_fn_outputs
    trainer = [output["logprobs"].to_numpy()[len(prompt) - 1 :] for (prompt, _), output in zip(pairs, outputs, strict=True)]
    tokenizer = training.get_tokenizer()
    tokens = [
        TokenDifference(
            index, len(prompt) + i, token, tokenizer.decode([token]), sequence.logprobs[i], float(trainer[index][i])
        )
        for index, (prompt, sequence) in enumerate(pairs)
        for i, token in enumerate(sequence.tokens)
    ]
    comparison = _compare(tokens, num_worst)
    print(comparison)
    if comparison.kl_v2 > KL_BOUND:
        warnings.warn(
            f"KL {comparison.kl_v2:.3g} nats per token is above {KL_BOUND}: is the sampling client of the trainer's newest "
            "version, and both of the same base model?",
            NumericsWarning,
            stacklevel=2,
        )
    return comparison


def _compare(tokens: list[TokenDifference], num_worst: int) -> LogprobComparison:
    differences: np.ndarray[Any, Any] = np.array([token.difference for token in tokens])
    worst = sorted(tokens, key=lambda token: -abs(token.difference))[:num_worst]
    return LogprobComparison(
        num_tokens=len(tokens),
        kl_v1=float(-differences.mean()),
        kl_v2=float(0.5 * (differences**2).mean()),
        mean_abs=float(np.abs(differences).mean()),
        max_abs=float(np.abs(differences).max()),
        worst=tuple(worst),
    )
