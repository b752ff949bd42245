"""What durability costs: saving and loading a state, a snapshot after every step, and registering every refresh. SmolLM2-135M,
LoRA rank 16, steps of 8 x 256 tokens.

The two hosts that are compared, with and without snapshots, live at the same time and take turns. Registering happens behind
the samples; its cost is given as an upper bound: the time that it takes one core, beside that of a step.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from measure import random_data, report, summary

import raysessions as rs
from raysessions.adapter_weights import from_peft_files, to_peft_files
from raysessions.registry import Registry
from raysessions.storage_location import StorageLocation
from raysessions.uris import VersionUri

BASE_MODEL = "smollm2-135m-instruct"
RANK = 16
STEPS = 8
REPEATS = 5


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="raysessions-bench-") as folder, rs.ServiceClient(output_uri=folder) as service:
        steps = measure_steps(service)
        measure_saves(service, folder, steps)


def measure_steps(service: rs.ServiceClient) -> dict[str, list[float]]:
    """Seconds of a step, with a snapshot after each and without."""
    options = {"num_cpus": 0}
    configs = {
        "with_snapshots": rs.TrainingConfig(actor_options=options),
        "without": rs.TrainingConfig(max_recoveries=0, actor_options=options),
    }
    sessions = {
        name: service.create_lora_training_client(BASE_MODEL, rank=RANK, seed=0, training=config)
        for name, config in configs.items()
    }
    data = random_data([256] * 8)
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for turn in range(STEPS + 1):
        for name in (list(sessions), list(reversed(sessions)))[turn % 2]:  # neither always follows the other
            training = sessions[name]
            started = time.perf_counter()
            for _ in range(2):  # the snapshot of one step is taken during the next
                training.forward_backward(data)
                training.optim_step().result()
            if turn:
                seconds[name].append((time.perf_counter() - started) / 2)
    for training in sessions.values():
        training.stop()
    return seconds


def measure_saves(service: rs.ServiceClient, folder: str, steps: dict[str, list[float]]) -> None:
    with service.create_lora_training_client(BASE_MODEL, rank=RANK, seed=0) as training:
        data = random_data([256] * 8)
        training.forward_backward(data)
        training.optim_step().result()
        adapter_bytes = 4 * training.get_info().num_trainable_parameters
        saves, loads = [], []
        for repeat in range(REPEATS):
            started = time.perf_counter()
            path = training.save_state(f"state-{repeat}").result().path
            saves.append(time.perf_counter() - started)
            started = time.perf_counter()
            training.load_state_with_optimizer(path).result()
            loads.append(time.perf_counter() - started)
        state_bytes = service.get_checkpoint(path).num_bytes
        claims, writes, version_bytes = measure_registering(service, training, folder)
    step_s = float(np.median(steps["with_snapshots"]))
    report(
        "checkpoint",
        {
            "adapter_float32_bytes": adapter_bytes,
            "state_bytes": state_bytes,
            "sampler_version_bytes": version_bytes,
            "save_state_s": summary(saves),
            "load_state_s": summary(loads),
            "claim_s": summary(claims),
            "write_version_s": summary(writes),
            **{f"step_s_{name}": summary(values) for name, values in steps.items()},
        },
        {
            "bytes of a state over the float32 adapter's": (state_bytes / adapter_bytes, -5.0),
            "bytes of a sampler version over the bfloat16 adapter's": (version_bytes / (adapter_bytes / 2), -1.05),
            "step with a snapshot over one without": (step_s / float(np.median(steps["without"])), -1.05),
            "registering a refresh over a step": ((float(np.median(claims)) + float(np.median(writes))) / step_s, -0.02),
        },
    )


def measure_registering(
    service: rs.ServiceClient, training: rs.TrainingClient, folder: str
) -> tuple[list[float], list[float], int]:
    """The host's work for one refresh, done here: claiming a number, making the files and writing them."""
    path = training.save_weights_for_sampler("version").result().path
    while not any(info.path == path for info in service.list_checkpoints("sampler")):
        time.sleep(0.1)
    registry = Registry(StorageLocation(folder))
    info, files = registry.read(VersionUri.parse(path))
    weights = from_peft_files(files)
    claims, writes = [], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        uri = registry.claim("default")
        claims.append(time.perf_counter() - started)
        started = time.perf_counter()
        registry.write(uri, info, to_peft_files(weights, BASE_MODEL).items())
        writes.append(time.perf_counter() - started)
    return claims, writes, sum(file.stat().st_size for file in Path(folder, "versions/default", f"v{uri.version}").iterdir())


if __name__ == "__main__":
    main()
