"""What the tests of arguments share."""

from __future__ import annotations

from collections.abc import Iterable

from datums import supervised

import raysessions as rs

DATA = supervised((6, 9, 40))
ANYWHERE = {"num_cpus": 0}


def config_of(**settings) -> rs.TrainingConfig:
    return rs.TrainingConfig(**{"num_threads": 1, "actor_options": ANYWHERE, **settings})


def logprobs(training: rs.TrainingClient) -> list[float]:
    return [lp for output in training.forward(DATA).result().loss_fn_outputs for lp in output["logprobs"].tolist()]


def stepped(training: rs.TrainingClient, **adam: float) -> list[float]:
    """Logprobs after two optimizer steps."""
    for _ in range(2):
        training.forward_backward(DATA)
        training.optim_step(rs.AdamParams(**{"learning_rate": 1e-2, **adam}))
    return logprobs(training)


def names_of(tests: Iterable[str], prefix: str) -> set[str]:
    """The arguments that tests are about: `test_PREFIX_ARGUMENT` or `test_PREFIX_ARGUMENT__what_it_shows`."""
    own = [name for name in tests if name.startswith(f"test_{prefix}_")]
    return {name.removeprefix(f"test_{prefix}_").partition("__")[0] for name in own}
