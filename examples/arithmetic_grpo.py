"""GRPO on one-digit addition: sample groups of answers, reward them, move towards the better half of each group.

python examples/arithmetic_grpo.py                      # a local Ray, CPU is enough
python examples/arithmetic_grpo.py --address auto       # this machine's Ray cluster
"""

from __future__ import annotations

import argparse
import random
import time

import raysessions as rs
from raysessions.cookbook.arithmetic import MAX_NEW_TOKENS, Accuracy, Arithmetic, Problem
from raysessions.cookbook.curves import draw_curves
from raysessions.cookbook.table import StepTable, Stopwatch

PROBLEMS_PER_STEP = 6
GROUP_SIZE = 8


def main() -> None:
    args = parse_args()
    service = rs.ServiceClient(args.address)
    with service.create_lora_training_client(args.base_model, rank=16, seed=args.seed) as training:
        task = Arithmetic(training.get_tokenizer(), seed=args.seed)
        rng = random.Random(args.seed)
        sampler = training.save_weights_and_get_sampling_client("start")
        before = task.evaluate(sampler)
        started = time.perf_counter()
        rewards: list[float] = []
        accuracies = [before]
        with StepTable(
            "step", "reward", "held-out", "KL", "grad norm", "tok/s", "sample s", "train s", "save s", "eval s"
        ) as table:
            for step in range(1, args.steps + 1):
                clock = Stopwatch()
                with clock.phase("sample"):
                    groups = sample_groups(sampler, rng.sample(task.train, PROBLEMS_PER_STEP), seed=rng.getrandbits(31))
                data, reward = build_data(task, groups)
                rewards.append(reward)
                with clock.phase("train"):
                    metrics = train(training, data, args.learning_rate)
                with clock.phase("save"):
                    sampler = training.save_weights_and_get_sampling_client(f"step-{step}")
                with clock.phase("eval"):
                    accuracies.append(task.evaluate(sampler))
                seconds = clock.seconds
                num_tokens = sum(len(sequence.tokens) for _, sequences in groups for sequence in sequences)
                table.add(
                    step, reward, f"{accuracies[-1].sampled:.0%}", metrics["kl"], metrics["grad_norm"],
                    num_tokens / seconds["sample"], *(seconds[phase] for phase in ("sample", "train", "save", "eval")),
                )  # fmt: skip
    report(before, accuracies[-1], time.perf_counter() - started)
    draw_curves(
        args.plot,
        "GRPO on one-digit addition",
        {
            "mean reward, training problems": rewards,
            "accuracy, held-out, T=1": [accuracy.sampled for accuracy in accuracies],
            "accuracy, held-out, greedy": [accuracy.greedy for accuracy in accuracies],
        },
    )


def sample_groups(
    sampler: rs.SamplingClient, problems: list[Problem], seed: int
) -> list[tuple[Problem, list[rs.SampledSequence]]]:
    """GROUP_SIZE answers to each problem; all requests are in flight at the same time."""
    futures = []
    for offset, problem in enumerate(problems):
        params = rs.SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=1.0, seed=seed + offset * GROUP_SIZE)
        futures.append(sampler.sample(problem.prompt, num_samples=GROUP_SIZE, sampling_params=params))
    return [(problem, future.result().sequences) for problem, future in zip(problems, futures, strict=True)]


def build_data(task: Arithmetic, groups: list[tuple[Problem, list[rs.SampledSequence]]]) -> tuple[list[rs.Datum], float]:
    """One datum per answer, whose advantage is its reward less its group's mean. Returns the mean reward too."""
    data, rewards = [], []
    for problem, sequences in groups:
        group = [task.reward(problem, sequence.tokens) for sequence in sequences]
        mean = sum(group) / len(group)
        rewards.extend(group)
        if max(group) > min(group):  # a group that agrees teaches nothing
            prompt = problem.prompt.to_ints()
            data.extend(rs.datum_for_rl(prompt, s, r - mean) for s, r in zip(sequences, group, strict=True))
    return data, sum(rewards) / len(rewards)


def train(training: rs.TrainingClient, data: list[rs.Datum], learning_rate: float) -> dict[str, float]:
    """One optimizer step on `data`. Returns the KL between sampler and trainer, and the gradient's norm."""
    if not data:
        return {"kl": 0.0, "grad_norm": 0.0}
    forward_backward = training.forward_backward(data, "importance_sampling")
    optim_step = training.optim_step(rs.AdamParams(learning_rate=learning_rate))  # queued behind it, not waited for
    metrics = forward_backward.result().metrics
    return {"kl": metrics["kl_sample_train_v2:mean"], "grad_norm": optim_step.result().metrics["grad_norm:max"]}


def report(before: Accuracy, after: Accuracy, seconds: float) -> None:
    print(f"\nHeld-out accuracy   before    after   ({seconds:.0f} s)")
    print(f"  greedy          {before.greedy:8.0%} {after.greedy:8.0%}")
    print(
        f"  sampled, T=1    {before.sampled:8.0%} {after.sampled:8.0%}   {100 * (after.sampled - before.sampled):+.0f} points"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="smollm2-135m-instruct", help="a folder, a Hugging Face id or a catalogue name")
    parser.add_argument("--address", default=None, help="of a Ray cluster; by default RAY_ADDRESS, else a local Ray")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", default="reward.png", help="where to draw the curve")
    return parser.parse_args()


if __name__ == "__main__":
    main()
