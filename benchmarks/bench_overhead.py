"""What the library adds to an operation: its time less the engine's own, and the time until a call returns.

A tiny random model, warm, so that nearly all of the time is ours.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import report, summary

import raysessions as rs

REPEATS = 200


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from tiny_model import make_tiny_model

    with (
        tempfile.TemporaryDirectory() as folder,
        rs.ServiceClient() as service,
        service.create_lora_training_client(str(make_tiny_model(Path(folder))), rank=8) as training,
    ):
        rng = np.random.default_rng(0)
        data = [rs.datum_for_supervised(rng.integers(3, 250, 65).tolist(), [1.0] * 65) for _ in range(8)]
        measured = measure(training, data)
    report(
        "overhead",
        {name: summary(values) for name, values in measured.items()},
        {
            "forward_backward less the engine, median ms": (1e3 * float(np.median(measured["forward_backward_s"])), -10),
            "optim_step less the engine, median ms": (1e3 * float(np.median(measured["optim_step_s"])), -10),
            "a call returns its future, median ms": (1e3 * float(np.median(measured["call_s"])), -5),
        },
    )


def measure(training: rs.TrainingClient, data: list[rs.Datum]) -> dict[str, list[float]]:
    """Seconds of each kind, REPEATS times, after a warm-up."""
    times: dict[str, list[float]] = {"call_s": [], "forward_backward_s": [], "optim_step_s": []}
    for repeat in range(REPEATS + 20):
        started = time.perf_counter()
        future = training.forward_backward(data)
        called = time.perf_counter() - started
        forward_backward = future.result().metrics["engine_seconds:max"]
        both = time.perf_counter() - started - forward_backward
        started = time.perf_counter()
        engine = training.optim_step().result().metrics["engine_seconds:max"]
        step = time.perf_counter() - started - engine
        if repeat >= 20:
            times["call_s"].append(called)
            times["forward_backward_s"].append(both)
            times["optim_step_s"].append(step)
    return times


if __name__ == "__main__":
    main()
