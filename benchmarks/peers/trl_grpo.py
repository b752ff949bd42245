"""The peer's side of the GRPO benchmark: the task of examples/arithmetic_grpo.py under Hugging Face TRL's GRPOTrainer.

Stands alone, as TRL has an environment of its own, without raysessions:

python3 -m venv trl-venv && trl-venv/bin/pip install -r benchmarks/peers/requirements-trl.txt
trl-venv/bin/python benchmarks/peers/trl_grpo.py --base-model FOLDER --steps 8 --threads 2 --out trl.json

Prompts, their order, the reward, batch, LoRA, optimizer and dtypes are ours. What TRL does besides is TRL's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the Hugging Face libraries are imported

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUM_HELD_OUT_PAIRS = 12
MAX_NEW_TOKENS = 14
PROBLEMS_PER_STEP = 6
GROUP_SIZE = 8
LEARNING_RATE = 3e-4
LORA_RANK = 16
LORA_ALPHA = 32
LORA_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PACKAGES = ("trl", "transformers", "peft", "accelerate", "torch")


class RewardLog:
    """TRL's reward function. Keeps the mean of each call: TRL makes one call a step, with all 48 answers."""

    __name__ = "arithmetic"  # TRL names its metrics after the reward function

    def __init__(self) -> None:
        self.means: list[float] = []

    def __call__(self, completions: list[Any], total: list[int], **_: Any) -> list[float]:
        rewards = [reward(messages[0]["content"], right) for messages, right in zip(completions, total, strict=True)]
        self.means.append(sum(rewards) / len(rewards))
        return rewards


class StepClock(TrainerCallback):
    """Wall seconds of each step.

    GRPOTrainer generates and scores inside `training_step`, so all of it lies between begin and end, as do forward,
    backward and the optimizer; loading the model and building the trainer come before.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)
        print(f"step {len(self.seconds)}: {self.seconds[-1]:.2f} s", flush=True)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    rewards, clock = RewardLog(), StepClock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=str(args.base_model),
            reward_funcs=rewards,
            args=grpo_config(args, scratch),
            train_dataset=dataset(args.steps, args.seed),
            callbacks=[clock],
            peft_config=lora_config(),
        )
        trainer.train()
    args.out.write_text(json.dumps(result(args, clock.seconds, rewards.means), indent=2) + "\n")


def train_problems(seed: int) -> list[tuple[int, int]]:
    """The ordered operand pairs to train on: all but 12 unordered pairs, which `seed` holds out."""
    pairs = list(itertools.combinations_with_replacement(range(10), 2))
    random.Random(seed).shuffle(pairs)
    return sorted({order for a, b in pairs[NUM_HELD_OUT_PAIRS:] for order in ((a, b), (b, a))})


def dataset(steps: int, seed: int) -> Dataset:
    """The problems in the order in which our loop asks them, PROBLEMS_PER_STEP rows a step."""
    problems = train_problems(seed)
    rng = random.Random(seed)
    rows = []
    for _ in range(steps):
        rows.extend(rng.sample(problems, PROBLEMS_PER_STEP))
        rng.getrandbits(31)  # our loop draws its sampling seed here
    prompts = [[{"role": "user", "content": f"What is {a}+{b}? Answer with just the number."}] for a, b in rows]
    return Dataset.from_dict({"prompt": prompts, "total": [a + b for a, b in rows]})


def reward(answer: str, total: int) -> float:
    """0.8 for the right sum as the last number, and 0.2 for nothing but digits, as the question asks."""
    answer = answer.strip()
    numbers = re.findall(r"\d+", answer)
    return 0.8 * (bool(numbers) and numbers[-1] == str(total)) + 0.2 * answer.isdigit()


def lora_config() -> LoraConfig:
    return LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, lora_dropout=0.0, target_modules=LORA_MODULES, task_type="CAUSAL_LM")


def grpo_config(args: argparse.Namespace, scratch: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=scratch,
        seed=args.seed,
        max_steps=args.steps,
        # One batch of 48 answers is generated, trained on once and thrown away, as in our loop.
        per_device_train_batch_size=PROBLEMS_PER_STEP * GROUP_SIZE,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=GROUP_SIZE,
        shuffle_dataset=False,
        max_completion_length=MAX_NEW_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        # Our loss is a sum over tokens. "dr_grpo" is that sum over a constant, and AdamW takes no notice of a constant.
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        # Every answer is trained on once, so the ratio is 1 and PPO's clip (epsilon) never acts.
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-12,
        weight_decay=0.0,
        max_grad_norm=0.0,  # 0: no clipping; TRL's 1.0 would clip
        # What is fastest on CPU: bfloat16 weights with autocast (float32 takes 1.7 times as long), eager attention (SDPA
        # takes 1.1 times as long at these lengths), activations kept, no logs, no saves. Generation uses the KV cache.
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "eager"},
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def result(args: argparse.Namespace, seconds: list[float], rewards: list[float]) -> dict[str, Any]:
    return {
        "framework": "trl",
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
        "threads": args.threads,
        "seed": args.seed,
        "seconds_per_step": seconds,
        "rewards": rewards,
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", type=Path, required=True, help="a folder in Hugging Face format")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch")
    parser.add_argument("--out", type=Path, required=True, help="where to write the numbers, JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
