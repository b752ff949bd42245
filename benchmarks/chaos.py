"""A GRPO run through which a random actor is killed every few seconds, against one that is left alone: the same losses.

One sequence is sampled at a time, so that no logprob depends on which others happen to be in a batch with it: vLLM's last bits
do, and Adam's first steps make as much of a gradient's last bits as of its first.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from dataclasses import dataclass

import numpy as np
from actor_processes import kill
from measure import report

import raysessions as rs

BASE_MODEL = "smollm2-135m-instruct"
ACTORS = ("TrainingActor", "SamplingActor", "ModelHost", "SamplingPool", "SessionManager", "SessionVault", "DriverAnchor")
PROMPTS, GROUP, NEW_TOKENS = 4, 4, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill-every-s", type=float, default=20)
    parser.add_argument("--base-model", default=BASE_MODEL)
    parser.add_argument("--max-kills", type=int, default=None, help="then the rest of the run is left alone")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Room for those that come back before the dead have been cleared away.
    share = {"num_cpus": 0}
    with rs.ServiceClient(
        training=rs.TrainingConfig(actor_options=share),
        sampling=rs.SamplingConfig(max_num_seqs=1, kv_cache_gib=0.5, actor_options=share),
    ) as service:
        calm, calm_s = run(service, arguments, None)
        killer = Killer(arguments)
        disturbed, disturbed_s = run(service, arguments, killer)
        killer.stop()
    differences = [abs(one.loss - other.loss) / one.scale for one, other in zip(disturbed, calm, strict=True)]
    num_tokens_apart = sum(int((one.tokens != other.tokens).sum()) for one, other in zip(disturbed, calm, strict=True))
    report(
        "chaos",
        {
            "losses_undisturbed": [step.loss for step in calm],
            "losses_disturbed": [step.loss for step in disturbed],
            "scales": [step.scale for step in calm],
            "killed": killer.killed,
            "seconds_undisturbed": calm_s,
            "seconds_disturbed": disturbed_s,
        },
        {
            "sampled tokens that differ": (num_tokens_apart, -0.0),
            "largest difference of a step's loss, of the sum of its terms' sizes": (max(differences), -0.0),
            "actors killed": (len(killer.killed), arguments.max_kills or 3),
        },
    )


@dataclass(frozen=True)
class Step:
    """What happened in it."""

    tokens: np.ndarray
    """Sampled, (PROMPTS, GROUP, NEW_TOKENS)."""
    loss: float
    """Near 0 by construction: a group's advantages cancel."""
    scale: float
    """What the loss would be if they did not: the sum of |advantage| over all tokens."""


class Killer:
    """Kills in a thread, one after the other."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._rng = random.Random(arguments.seed)
        self._every_s = arguments.kill_every_s
        self._max_kills = arguments.max_kills
        self._stopped = threading.Event()
        self.killed: list[str] = []
        self._thread = threading.Thread(target=self._kill, daemon=True)
        self._thread.start()

    def _kill(self) -> None:
        while len(self.killed) != self._max_kills and not self._stopped.wait(self._every_s):
            name = self._rng.choice(ACTORS)
            if kill(name):
                self.killed.append(name)
                print(f"chaos: killed {name}", flush=True)

    @property
    def is_done(self) -> bool:
        return len(self.killed) == self._max_kills

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def run(service: rs.ServiceClient, arguments: argparse.Namespace, killer: Killer | None) -> tuple[list[Step], float]:
    """Every step, and the seconds of all. The reward is how many tokens of an answer are even."""
    started = time.monotonic()
    steps = []
    training = service.create_lora_training_client(arguments.base_model, rank=8, seed=0)
    vocab_size = training.get_info().vocab_size
    sampler = training.save_weights_and_get_sampling_client("start")
    for step in range(arguments.steps):
        if killer is not None and arguments.max_kills:  # a quick run waits for its share of kills
            share = arguments.max_kills * (step + 1) // arguments.steps
            while len(killer.killed) < share and not killer.is_done:
                time.sleep(0.2)
        rng = random.Random(step)
        prompts = [[rng.randrange(3, vocab_size) for _ in range(20)] for _ in range(PROMPTS)]
        futures = [
            sampler.sample(rs.ModelInput.from_ints(prompt), GROUP, rs.SamplingParams(max_tokens=NEW_TOKENS, seed=step, stop=[]))
            for prompt in prompts
        ]
        data, groups, scale = [], [], 0.0
        for prompt, future in zip(prompts, futures, strict=True):
            group = future.result(timeout=300).sequences
            rewards = [sum(token % 2 == 0 for token in sequence.tokens) / NEW_TOKENS for sequence in group]
            mean = sum(rewards) / len(rewards)
            data += [rs.datum_for_rl(prompt, s, reward - mean) for s, reward in zip(group, rewards, strict=True)]
            groups.append([sequence.tokens for sequence in group])
            scale += sum(abs(reward - mean) for reward in rewards) * NEW_TOKENS
        output = training.forward_backward(data, "importance_sampling")
        training.optim_step(rs.AdamParams(learning_rate=1e-3))
        steps.append(Step(np.array(groups), output.result(timeout=300).loss, scale))
        sampler = training.save_weights_and_get_sampling_client(f"step-{step}")
        print(f"chaos: step {step}: loss {steps[-1].loss:.6g} ({time.monotonic() - started:.0f} s)", flush=True)
    training.stop()
    return steps, time.monotonic() - started


if __name__ == "__main__":
    main()
