"""Seconds from the kill of a process to the next answer that needs it, each call sent right after the kill. SmolLM2-135M.

A rank and a replica come back with their model; a host with its ranks; a pool with its engine; a manager with its records.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from actor_processes import kill, processes_of
from measure import random_data, report, summary

import raysessions as rs

BASE_MODEL = "smollm2-135m-instruct"
REPEATS = 3
PROMPT = rs.ModelInput.from_ints(range(100, 132))
BOUNDS_S = {
    "TrainingActor": 40.0, "SamplingActor": 60.0, "ModelHost": 45.0, "SamplingPool": 75.0, "SessionManager": 10.0,
    "SessionVault": 10.0,
}  # fmt: skip


def main() -> None:
    times: dict[str, list[float]] = {}
    with (
        rs.ServiceClient(sampling=rs.SamplingConfig(kv_cache_gib=0.5)) as service,
        service.create_lora_training_client(BASE_MODEL, rank=16, seed=0) as training,
    ):
        data = random_data([64] * 4)
        sampler = training.save_weights_and_get_sampling_client("start")
        params = rs.SamplingParams(max_tokens=8, temperature=0.0)

        def train() -> None:
            training.forward_backward(data)
            training.optim_step().result(timeout=300)

        def sample() -> None:
            sampler.sample(PROMPT, 1, params).result(timeout=300)

        probes: dict[str, Callable[[], Any]] = {
            "TrainingActor": train, "SamplingActor": sample, "ModelHost": train, "SamplingPool": sample,
            "SessionManager": service.list_sessions, "SessionVault": train,
        }  # fmt: skip
        for name, probe in probes.items():
            times[name] = []
            for _ in range(REPEATS):
                probe()  # all is well, and a copy of the last step is in the vault
                time.sleep(2)
                before = {process.pid for process in processes_of(name)}
                started = time.perf_counter()
                assert kill(name), name
                probe()
                times[name].append(time.perf_counter() - started)
                print(f"recovery: {name}: {times[name][-1]:.1f} s", flush=True)
                while not {process.pid for process in processes_of(name)} - before:
                    time.sleep(0.1)
    report(
        "recovery",
        {f"{name}_s": summary(values) for name, values in times.items()},
        {f"killed {name}, to the next answer, s": (max(values), -BOUNDS_S[name]) for name, values in times.items()},
    )


if __name__ == "__main__":
    main()
