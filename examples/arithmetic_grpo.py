"""GRPO on one-digit addition: sample groups of answers, reward them, move towards the better half of each group.

python examples/arithmetic_grpo.py                      # a local Ray, CPU is enough
python examples/arithmetic_grpo.py --address auto       # this machine's Ray cluster
python examples/arithmetic_grpo.py --run my-run         # killed and started again, it goes on after its last step
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import asdict

import raysessions as rs
from raysessions.cookbook.arithmetic import MAX_NEW_TOKENS, Arithmetic, Problem
from raysessions.cookbook.curves import draw_curves
from raysessions.cookbook.resume import ResumableRun, Row
from raysessions.cookbook.table import StepTable, Stopwatch

PROBLEMS_PER_STEP = 6
GROUP_SIZE = 8


def main() -> None:
    args = parse_args()
    service = rs.ServiceClient(args.address, model_package_group=args.run or "default")
    run, started = ResumableRun(service, args.run, args.metrics), time.perf_counter()
    with run.open(lambda: service.create_lora_training_client(args.base_model, rank=16, seed=args.seed)) as training:
        task = Arithmetic(training.get_tokenizer(), seed=args.seed)
        sampler = training.save_weights_and_get_sampling_client("start")
        if not run.rows:
            run.finish_step(training, asdict(task.evaluate(sampler)))
        with StepTable(
            "step", "reward", "held-out", "KL", "grad norm", "tok/s", "sample s", "train s", "save s", "eval s"
        ) as table:
            for step in range(run.next_step, args.steps + 1):
                rng, clock = random.Random(f"{args.seed}, {step}"), Stopwatch()
                with clock.phase("sample"):
                    groups = sample_groups(sampler, rng.sample(task.train, PROBLEMS_PER_STEP), seed=rng.getrandbits(31))
                data, reward = build_data(task, groups)
                with clock.phase("train"):
                    metrics = train(training, data, args.learning_rate)
                with clock.phase("save"):
                    sampler = training.save_weights_and_get_sampling_client(f"step-{step}")
                with clock.phase("eval"):
                    accuracy = task.evaluate(sampler)
                run.finish_step(training, {"reward": reward, **asdict(accuracy), **metrics})
                seconds = clock.seconds
                num_tokens = sum(len(sequence.tokens) for _, sequences in groups for sequence in sequences)
                table.add(
                    step, reward, f"{accuracy.sampled:.0%}", metrics["kl"], metrics["grad_norm"],
                    num_tokens / seconds["sample"], *(seconds[phase] for phase in ("sample", "train", "save", "eval")),
                )  # fmt: skip
    report(run.rows[0], run.rows[-1], time.perf_counter() - started)
    curves = {
        "mean reward, training problems": "reward",
        "accuracy, held-out, T=1": "sampled",
        "accuracy, held-out, greedy": "greedy",
    }
    columns = {label: [row[column] for row in run.rows if column in row] for label, column in curves.items()}
    draw_curves(args.plot, "GRPO on one-digit addition", columns)


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


def report(before: Row, after: Row, seconds: float) -> None:
    print(f"\nHeld-out accuracy   before    after   ({seconds:.0f} s)")
    print(f"  greedy          {before['greedy']:8.0%} {after['greedy']:8.0%}")
    points = 100 * (after["sampled"] - before["sampled"])
    print(f"  sampled, T=1    {before['sampled']:8.0%} {after['sampled']:8.0%}   {points:+.0f} points")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="smollm2-135m-instruct", help="a folder, a Hugging Face id or a catalogue name")
    parser.add_argument("--address", default=None, help="of a Ray cluster; by default RAY_ADDRESS, else a local Ray")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", default=None, help="a name under which the run is saved after each step, and resumed")
    parser.add_argument("--metrics", default="metrics.jsonl", help="where to write a line for each step")
    parser.add_argument("--plot", default="reward.png", help="where to draw the curve")
    return parser.parse_args()


if __name__ == "__main__":
    main()
