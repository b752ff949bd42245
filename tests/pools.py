"""A sampling pool seen from the tests: its processes, and adapters that force a token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import ray
from datums import supervised

import raysessions as rs
from raysessions.actors.protocol import PoolStatus
from raysessions.storage_location import StoredUri
from raysessions.uris import VersionUri

NO_CPU = {"num_cpus": 0}
"""Actor options: the machine has two CPUs, and the resident session's actors have them."""
TRAINING = rs.TrainingConfig(actor_options=NO_CPU)
POOL = rs.SamplingConfig(
    num_replicas=2, kv_cache_gib=0.25, max_loras=2, max_live_versions=4, max_num_seqs=8, placement_timeout_s=20
)
PROMPT = rs.ModelInput.from_ints(list(range(40, 70)))


SURE = -0.2
"""Logprob that makes a token the greedy one, nats."""


def status(training: rs.TrainingClient) -> PoolStatus:
    return ray.get(training._pool.status.remote())


def stored(training: rs.TrainingClient, path: str) -> StoredUri:
    """A version as the pool knows it."""
    return StoredUri(VersionUri.parse(path), training._location)


def greedy(max_tokens: int = 20) -> rs.SamplingParams:
    return rs.SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=[])


def teach(training: rs.TrainingClient, token: int) -> None:
    """Trains until the session is sure to answer PROMPT with `token`, again and again."""
    answer = [token] * 20
    data = [rs.datum_for_supervised([*PROMPT.to_ints(), *answer], [0.0] * PROMPT.length + [1.0] * len(answer))]
    for _ in range(200):
        output = training.forward_backward(data).result()
        if output.loss_fn_outputs[0]["logprobs"].to_numpy()[-len(answer) :].min() > SURE:
            break
        training.optim_step(rs.AdamParams(learning_rate=2e-2)).result()
    else:
        raise AssertionError(f"token {token} was not learnt")


def tokens_of(futures: Sequence[rs.APIFuture], timeout: float = 120) -> list[list[int]]:  # type: ignore[type-arg]
    """Of every sequence that the samples returned."""
    return [sequence.tokens for future in futures for sequence in future.result(timeout=timeout).sequences]


def train(training: rs.TrainingClient, steps: int = 1, learning_rate: float = 2e-2, seed: int = 0) -> None:
    for step in range(steps):
        training.forward_backward(supervised([40, 25], seed=seed + step))
        training.optim_step(rs.AdamParams(learning_rate=learning_rate)).result()


def trainer_logprobs(training: rs.TrainingClient, tokens: list[int]) -> np.ndarray:
    """Of tokens[1:], by the trainer's forward."""
    datum = rs.datum_for_supervised(tokens, [1.0] * len(tokens))
    return training.forward([datum]).result().loss_fn_outputs[0]["logprobs"].to_numpy()
