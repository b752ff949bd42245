"""Tokens per second of forward_backward + optim_step against a bare PEFT loop: same model, dtype, LoRA and threads.

(a) 8 sequences of 256 tokens. (b) 32 sequences of 16 to 512 tokens, log-uniform, which the bare loop pads in batches of 8,
in the order given and sorted by length. Only real tokens count. Random tokens: no prompt is shared.

(c) 8 sequences of 64 tokens on one and two ranks, which share the machine's cores, with ZeRO stages 0 to 3 and with activation
checkpointing, against one rank of stage 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import interleaved, report, summary

import raysessions as rs
from raysessions.models import local_folder

LORA = {"rank": 16, "alpha": 32}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
REPEATS = 3

SCALING: dict[str, dict[str, Any]] = {
    f"{workers} rank{'s' * (workers > 1)}, stage {stage}{', checkpointing' * checkpointing}": {
        "num_workers": workers,
        "zero_stage": stage,
        "gradient_checkpointing": checkpointing,
    }
    for workers in (1, 2)
    for stage in (0, 1, 2, 3)
    for checkpointing in ((False, True) if stage in (0, 3) else (False,))
}

Sequences = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="smollm2-135m-instruct")
    base_model = parser.parse_args().base_model
    threads = len(os.sched_getaffinity(0))
    rng = np.random.default_rng(0)
    equal = _random_sequences(rng, [256] * 8)
    mixed = _random_sequences(rng, np.exp(rng.uniform(np.log(16), np.log(512), 32)).astype(int).tolist())
    bare = BareLoop(local_folder(base_model), threads)
    config = rs.TrainingConfig(num_threads=threads)
    with (
        rs.ServiceClient(training=config) as service,
        service.create_lora_training_client(base_model, seed=0, **LORA) as training,
    ):
        times = interleaved(
            {
                "equal_raysessions": _step(training, equal),
                "equal_bare": lambda: bare.step(equal),
                "mixed_raysessions": _step(training, mixed),
                "mixed_bare_given_order": lambda: bare.step(mixed),
                "mixed_bare_sorted": lambda: bare.step(sorted(mixed, key=len)),
            },
            REPEATS,
        )
    scaling = measure_scaling(base_model, threads)
    report_times(times, _num_tokens(equal), _num_tokens(mixed), scaling)


def measure_scaling(base_model: str, threads: int) -> dict[str, list[float]]:
    """Tokens per second of each repeat, by setting; each setting has a base model of its own, one after the other."""
    short = _random_sequences(np.random.default_rng(1), [64] * 8)
    speed = {}
    with rs.ServiceClient() as service:
        for name, settings in SCALING.items():
            workers = settings.get("num_workers", 1)
            options = {"num_threads": max(1, threads // workers), "actor_options": {"num_cpus": 0}}
            config = rs.TrainingConfig(**options, **settings)
            with service.create_lora_training_client(base_model, seed=0, training=config, **LORA) as training:
                times = interleaved({name: _step(training, short)}, REPEATS)[name]
            speed[name] = [_num_tokens(short) / seconds for seconds in times]
            print(f"train: {name}: {np.median(speed[name]):.0f} tokens/s", flush=True)
    return speed


def report_times(times: dict[str, list[float]], equal_tokens: int, mixed_tokens: int, scaling: dict[str, list[float]]) -> None:
    speed = {
        name: [(equal_tokens if name.startswith("equal") else mixed_tokens) / seconds for seconds in values]
        for name, values in times.items()
    }
    median = {name: float(np.median(values)) for name, values in (speed | scaling).items()}
    one = median["1 rank, stage 0"]
    report(
        "train",
        {f"{name}_tokens_per_s": summary(values) for name, values in (speed | scaling).items()},
        {
            "equal lengths, over bare PEFT": (median["equal_raysessions"] / median["equal_bare"], 0.95),
            "mixed lengths, over padded in given order": (median["mixed_raysessions"] / median["mixed_bare_given_order"], 2.0),
            "mixed lengths, over padded and sorted": (median["mixed_raysessions"] / median["mixed_bare_sorted"], 1.2),
            "two ranks of stage 0 over one, same cores": (median["2 ranks, stage 0"] / one, 0.8),
            "two ranks of stage 2 over one of stage 0": (median["2 ranks, stage 2"] / one, 0.75),
            "two ranks of stage 3 over one of stage 0": (median["2 ranks, stage 3"] / one, 0.1),
            "checkpointing over none, one rank": (median["1 rank, stage 0, checkpointing"] / one, 0.65),
        },
    )


class BareLoop:
    """The loop one writes by hand with PEFT: padded batches of 8, autocast, one AdamW step for all of them."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        config = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=TARGETS)
        self._model = get_peft_model(model, config).train()
        trainable = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trainable, lr=1e-5)

    def step(self, sequences: Sequences) -> None:
        import torch

        for begin in range(0, len(sequences), 8):
            batch = sequences[begin : begin + 8]
            longest = max(map(len, batch))
            ids = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in batch])
            mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in batch])
            labels = ids.masked_fill(mask == 0, -100)
            with torch.autocast("cpu", torch.bfloat16):
                loss = self._model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _step(training: rs.TrainingClient, sequences: Sequences) -> Callable[[], Any]:
    data = [rs.datum_for_supervised(sequence, [1.0] * len(sequence)) for sequence in sequences]

    def step() -> None:
        training.forward_backward(data)
        training.optim_step(rs.AdamParams(learning_rate=1e-5)).result()

    return step


def _random_sequences(rng: np.random.Generator, lengths: Sequence[int]) -> Sequences:
    return [rng.integers(3, 49_000, length).tolist() for length in lengths]


def _num_tokens(sequences: Sequences) -> int:
    return sum(map(len, sequences))


if __name__ == "__main__":
    main()
