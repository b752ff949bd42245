"""Seconds per GRPO step of examples/arithmetic_grpo.py against TRL's GRPOTrainer: same task, model, batch, LoRA and threads.

TRL lives in an environment of its own (benchmarks/.peers/trl), made on first use. Both must learn: the mean reward of the last
three steps is compared with that of the first three. Evaluation is not counted; sampling, training and the refresh are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import report, summary

import raysessions as rs
from raysessions.cookbook.arithmetic import Arithmetic
from raysessions.models import local_folder

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
import arithmetic_grpo as example  # noqa: E402  (found through the line above)

BASE_MODEL = "smollm2-135m-instruct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    ours = run_ours(args.steps, args.seed, threads)
    theirs = run_trl(args.steps, args.seed, threads)
    # The first step of either warms allocators and caches.
    medians = [float(np.median(run["seconds_per_step"][1:])) for run in (ours, theirs)]
    gains = [float(np.mean(run["rewards"][-3:]) - np.mean(run["rewards"][:3])) for run in (ours, theirs)]
    report(
        "grpo",
        {
            "raysessions": {"seconds_per_step": summary(ours["seconds_per_step"]), "rewards": ours["rewards"]},
            "trl": {"seconds_per_step": summary(theirs["seconds_per_step"]), **theirs},
        },
        {
            "steps per second over TRL's": (medians[1] / medians[0], 2.0),
            "reward gained by raysessions": (gains[0], 0.1),
            "reward gained by TRL": (gains[1], 0.1),
        },
    )


def run_ours(steps: int, seed: int, threads: int) -> dict[str, Any]:
    seconds, rewards = [], []
    service = rs.ServiceClient(training=rs.TrainingConfig(num_threads=threads), sampling=rs.SamplingConfig(num_threads=threads))
    with service, service.create_lora_training_client(BASE_MODEL, rank=16, seed=seed) as training:
        task = Arithmetic(training.get_tokenizer(), seed=seed)
        rng = random.Random(seed)
        sampler = training.save_weights_and_get_sampling_client("start")
        for step in range(steps):
            started = time.perf_counter()
            problems = rng.sample(task.train, example.PROBLEMS_PER_STEP)
            groups = example.sample_groups(sampler, problems, seed=rng.getrandbits(31))
            data, reward = example.build_data(task, groups)
            example.train(training, data, learning_rate=3e-4)
            sampler = training.save_weights_and_get_sampling_client(f"step-{step}")
            seconds.append(time.perf_counter() - started)
            rewards.append(reward)
            print(f"grpo: raysessions: step {step + 1}, reward {reward:.2f}, {seconds[-1]:.1f} s", flush=True)
    return {"seconds_per_step": seconds, "rewards": rewards}


def run_trl(steps: int, seed: int, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trl.json"
        command = [
            str(_trl_python()), str(HERE / "peers" / "trl_grpo.py"), "--base-model", str(local_folder(BASE_MODEL)),
            "--steps", str(steps), "--seed", str(seed), "--threads", str(threads), "--out", str(out),
        ]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        return json.loads(out.read_text(encoding="utf-8"))


def _trl_python() -> Path:
    """The interpreter of TRL's own environment."""
    python = HERE / ".peers" / "trl" / "bin" / "python"
    if not python.exists():
        print("grpo: installing TRL into an environment of its own", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        requirements = HERE / "peers" / "requirements-trl.txt"
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)], check=True)
    return python


if __name__ == "__main__":
    main()
