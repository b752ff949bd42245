"""Sessions on one loaded base model: 1, 2, 4 and 8 of them, each by turns stepping and pausing as long as a step takes alone,
as a loop with a reward function does.

Total tokens per second against one session alone, and against as many sessions with a base model each, which share the cores;
what each added session adds to the rank's resident memory against its adapter's state, 16 bytes a parameter.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil
from measure import report

import raysessions as rs

RANK = 32
DATUMS, TOKENS = 8, 48
COUNTS = (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="smollm2-135m-instruct")
    parser.add_argument("--seconds", type=float, default=30, help="of each measurement")
    parser.add_argument("--separate", type=int, default=2, help="sessions with a base model each, to compare with")
    args = parser.parse_args()
    config = rs.TrainingConfig(num_threads=len(os.sched_getaffinity(0)), actor_options={"num_cpus": 0})
    results: dict[str, Any] = {}
    with rs.ServiceClient(training=config) as service, ExitStack() as stack:
        sessions: list[rs.TrainingClient] = []
        resident: dict[int, int] = {}
        for count in COUNTS:
            while len(sessions) < count:
                sessions.append(stack.enter_context(service.create_lora_training_client(args.base_model, rank=RANK, seed=0)))
                step(sessions[-1])
                step(sessions[-1])
                resident[len(sessions)] = rank_bytes()[0]
            if count == 1:
                pause = float(np.median([_seconds(lambda: step(sessions[0])) for _ in range(5)]))
            results[f"shared_{count}"] = measure(sessions, pause, args.seconds)
        state_bytes = 16 * sessions[0].get_info().num_trainable_parameters
    share = config.model_copy(update={"num_threads": max(1, config.num_threads // args.separate)})
    with rs.ServiceClient(training=share) as service, ExitStack() as stack:
        alone = [
            stack.enter_context(service.create_lora_training_client(args.base_model, rank=RANK, seed=0, share=False))
            for _ in range(args.separate)
        ]
        for session in alone:
            step(session)
        results[f"separate_{args.separate}"] = measure(alone, pause, args.seconds)
    growth = (resident[COUNTS[-1]] - resident[1]) / (COUNTS[-1] - 1)
    results |= {"pause_s": pause, "resident_bytes": resident, "adapter_state_bytes": state_bytes}
    one = results["shared_1"]["tokens_per_s"]
    fairness = {count: results[f"shared_{count}"]["least_share_of_mean"] for count in COUNTS}
    report(
        "sessions",
        results,
        {
            **{
                f"tokens/s of {count} sessions over one": (results[f"shared_{count}"]["tokens_per_s"] / one, 1.5)
                for count in COUNTS[1:]
            },
            f"tokens/s of {args.separate} sessions on one base over {args.separate} bases": (
                results[f"shared_{args.separate}"]["tokens_per_s"] / results[f"separate_{args.separate}"]["tokens_per_s"],
                0.95,
            ),
            "slowest of 8 sessions over their mean": (fairness[8], 0.5),
            "memory per added session over its adapter state": (growth / state_bytes, -1.2),
        },
    )


def measure(sessions: list[rs.TrainingClient], pause: float, seconds: float) -> dict[str, float]:
    """Every session in a thread of its own, as clients are."""
    counts = [0] * len(sessions)
    end = time.perf_counter() + seconds

    def loop(index: int) -> None:
        while time.perf_counter() < end:
            step(sessions[index])
            counts[index] += 1
            time.sleep(pause)

    threads = [threading.Thread(target=loop, args=(index,)) for index in range(len(sessions))]
    elapsed = _seconds(lambda: [[thread.start() for thread in threads], [thread.join() for thread in threads]])
    speed = sum(counts) * DATUMS * TOKENS / elapsed
    print(f"sessions: {len(sessions)}: {speed:.0f} tokens/s, steps {counts}", flush=True)
    return {"tokens_per_s": speed, "least_share_of_mean": min(counts) / float(np.mean(counts)), "steps": sum(counts)}


def step(training: rs.TrainingClient) -> None:
    training.forward_backward(DATA)
    training.optim_step(rs.AdamParams(learning_rate=1e-5)).result()


def rank_bytes() -> list[int]:
    """Resident memory of the training ranks below this process."""
    below = psutil.Process().children(recursive=True)
    return [process.memory_info().rss for process in below if process.name().startswith("ray::TrainingA")]


def _seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _data() -> list[rs.Datum]:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, 49_000, TOKENS + 1).tolist() for _ in range(DATUMS)]
    return [rs.datum_for_supervised(sequence, [1.0] * len(sequence)) for sequence in sequences]


DATA = _data()

if __name__ == "__main__":
    main()
