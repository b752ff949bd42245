"""A short run of a session, step by step."""

from __future__ import annotations

from datums import supervised

import raysessions as rs


def steps(training: rs.TrainingClient, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        output = training.forward_backward(supervised((20, 7, 50), seed=step))
        training.optim_step(rs.AdamParams(learning_rate=1e-2, weight_decay=0.1))
        losses.append(output.result().loss)
    return losses


def last_step(training: rs.TrainingClient) -> float:
    training.forward_backward(supervised((5,)))
    return training.optim_step(rs.AdamParams(learning_rate=0.0)).result().metrics["step:max"]
