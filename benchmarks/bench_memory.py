"""Peak resident memory of a training rank: against base + adapters × 16 bytes a parameter, and ZeRO stage 3 against stage 0.

A Llama with random float32 weights, about 0.5B parameters, so that the weights dominate. Two ranks, as plain processes. Peaks
are over what the process held before it loaded the model: Python and the libraries, about 0.7 GiB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import report

WORLD_SIZE = 2
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """One engine to measure."""

    name: str
    config: dict[str, Any]


SETTINGS = [
    Setting("stage 0", {"zero_stage": 0}),
    Setting("stage 2", {"zero_stage": 2}),
    Setting("stage 3", {"zero_stage": 3}),
    Setting("stage 3, checkpointing", {"zero_stage": 3, "gradient_checkpointing": True}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="of 20M parameters each")
    parser.add_argument("--tokens", type=int, default=64, help="of one forward_backward")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        num_parameters = in_a_process(make_model, folder, args.layers)
        measured = {setting.name: run_ranks(folder, setting, args.tokens) for setting in SETTINGS}
    peaks = {name: max(rank["peak_bytes"] for rank in of_ranks) for name, of_ranks in measured.items()}
    expected = 4 * num_parameters + 16 * measured["stage 0"][0]["adapter_parameters"]
    for name, peak in peaks.items():
        print(f"memory: {name}: {peak / GIB:.2f} GiB a rank at most (stage 0 by arithmetic: {expected / GIB:.2f})", flush=True)
    report(
        "memory",
        {"model_parameters": num_parameters, "expected_stage_0_bytes": expected, "ranks": measured},
        {
            "peak of stage 3 over stage 0's, two ranks": (peaks["stage 3"] / peaks["stage 0"], -0.65),
            "the same with all that the processes hold": (
                max(rank["whole_peak_bytes"] for rank in measured["stage 3"])
                / max(rank["whole_peak_bytes"] for rank in measured["stage 0"]),
                -0.75,
            ),
            "peak of stage 0 over base + adapters x 16 bytes": (peaks["stage 0"] / expected, -1.35),
        },
    )


def make_model(folder: str, num_layers: int) -> int:
    """Writes the model; returns its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192, hidden_size=1280, intermediate_size=3456, num_hidden_layers=num_layers, num_attention_heads=20,
        num_key_value_heads=20, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def in_a_process(function: Any, *args: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def run_ranks(folder: str, setting: Setting, num_tokens: int) -> list[dict[str, int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ProcessPoolExecutor(WORLD_SIZE, mp_context=multiprocessing.get_context("spawn")) as pool:
        ranks = [pool.submit(train, folder, setting.config, rank, port, num_tokens) for rank in range(WORLD_SIZE)]
        return [rank.result() for rank in ranks]


def train(folder: str, config: dict[str, Any], rank: int, port: int, num_tokens: int) -> dict[str, int]:
    """Loads, takes two steps, and tells what this process held at most."""
    import deepspeed  # noqa: F401  (what the libraries take is not the model's)
    import peft  # noqa: F401
    import torch

    import raysessions as rs
    from raysessions.actors.engines.deepspeed import DeepSpeedEngine
    from raysessions.actors.protocol import Seat
    from raysessions.batch import pack
    from raysessions.config import LoraConfig
    from raysessions.operations import Loss

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // WORLD_SIZE))
    before = _status("VmRSS")
    engine = DeepSpeedEngine(
        Path(folder),
        rs.TrainingConfig(num_workers=WORLD_SIZE, **config),
        Seat(rank, WORLD_SIZE, rank, WORLD_SIZE, "127.0.0.1", port),
    )
    loaded = _status("VmHWM")
    facts = engine.add_session("bench", LoraConfig(rank=16, alpha=32, seed=0))
    data = [_datum(seed, num_tokens // 4) for seed in range(4)]
    batch = pack(
        data, rs.LOSSES["cross_entropy"], vocab_size=engine.facts.vocab_size, context_length=engine.facts.context_length
    )
    for _ in range(2):
        engine.run_loss("bench", batch, Loss("cross_entropy", gates=("weights",)), backward=True)
        engine.optim_step("bench", rs.AdamParams())
    peak = _status("VmHWM")
    return {
        "before_loading_bytes": before,
        "loading_peak_bytes": loaded - before,
        "peak_bytes": peak - before,
        "whole_peak_bytes": peak,
        "adapter_parameters": facts.num_parameters,
    }


def _datum(seed: int, length: int) -> Any:
    import raysessions as rs

    tokens: Sequence[int] = np.random.default_rng(seed).integers(3, 8000, length + 1).tolist()
    return rs.datum_for_supervised(tokens, [1.0] * (length + 1))


def _status(field: str) -> int:
    """Bytes: VmRSS now, VmHWM at most so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
