"""Sampled tokens per second: 64 requests of 64 tokens, each to a prompt of 36 random tokens.

SamplingClient and a bare AsyncLLM with the same arguments take turns, both engines alive; then, one after the other,
SamplingClient with an adapter, vLLM's defaults on this CPU, and stock LoRA with the same binding.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import report, summary

import raysessions as rs
from raysessions.models import local_folder

BASE_MODEL = "smollm2-135m-instruct"
REQUESTS, NEW_TOKENS, PROMPT_TOKENS = 64, 64, 36
REPEATS = 5
SAMPLING = rs.SamplingConfig().for_rank(16)
ENGINES = ("client_and_bare", "client_adapter", "defaults", "stock_adapter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, help="measure this one only and print JSON")
    engine = parser.parse_args().engine
    if engine:
        print(json.dumps(measure(engine)))
        return
    speed = {name: values for engine in ENGINES for name, values in _in_a_process(engine).items()}
    median = {name: float(np.median(values)) for name, values in speed.items()}
    report(
        "sample",
        {f"{name}_tokens_per_s": summary(values) for name, values in speed.items()},
        {
            "through SamplingClient, over a bare AsyncLLM": (median["client"] / median["bare"], 0.95),
            "our settings, over vLLM's defaults": (median["bare"] / median["defaults"], 1.5),
            "with adapter, grouped over stock LoRA": (median["client_adapter"] / median["stock_adapter"], 3.0),
        },
    )


def measure(engine: str) -> dict[str, list[float]]:
    """Tokens per second of each repeat, by engine."""
    if engine == "client_and_bare":
        return asyncio.run(_measure_client_and_bare())
    if engine == "client_adapter":
        return {engine: _measure_adapter()}
    return {engine: asyncio.run(_measure_vllm(engine))}


def _measure_adapter() -> list[float]:
    with (
        rs.ServiceClient(sampling=SAMPLING) as service,
        service.create_lora_training_client(BASE_MODEL, rank=16, seed=0) as training,
    ):
        sampler = training.save_weights_and_get_sampling_client("start")
        return [_client_speed(sampler) for _ in range(REPEATS + 1)][1:]


async def _measure_client_and_bare() -> dict[str, list[float]]:
    bare = _start_vllm("bare")
    with rs.ServiceClient(sampling=SAMPLING) as service:
        sampler = await asyncio.to_thread(service.create_sampling_client, base_model=BASE_MODEL)
        speeds: dict[str, list[float]] = {"client": [], "bare": []}
        for _ in range(REPEATS + 1):
            speeds["client"].append(await asyncio.to_thread(_client_speed, sampler))
            speeds["bare"].append(await _vllm_speed(bare))
    bare.shutdown()
    return {name: values[1:] for name, values in speeds.items()}


async def _measure_vllm(engine: str) -> list[float]:
    llm = _start_vllm(engine)
    repeats = 2 if engine == "stock_adapter" else REPEATS  # a minute each
    speeds = [await _vllm_speed(llm, with_adapter=engine == "stock_adapter") for _ in range(repeats + 1)]
    llm.shutdown()
    return speeds[1:]


def _client_speed(sampler: rs.SamplingClient) -> float:
    params = rs.SamplingParams(max_tokens=NEW_TOKENS, stop=[])
    prompts = [rs.ModelInput.from_ints(prompt) for prompt in _prompts()]
    started = time.perf_counter()
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
    count = sum(len(future.result().sequences[0].tokens) for future in futures)
    return count / (time.perf_counter() - started)


def _start_vllm(engine: str) -> Any:
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    from raysessions.actors.engines.vllm import engine_arguments

    arguments = engine_arguments(local_folder(BASE_MODEL), SAMPLING)
    if engine != "bare":
        os.environ["VLLM_PLUGINS"] = "none"
        arguments.pop("worker_extension_cls")
    if engine == "defaults":
        os.environ.pop("VLLM_CPU_OMP_THREADS_BIND")
        arguments = {key: arguments[key] for key in ("model", "dtype", "kv_cache_memory_bytes")}
    return AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments))


async def _vllm_speed(llm: Any, with_adapter: bool = False) -> float:
    import vllm
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("bench/v1", 1, _write_adapter()) if with_adapter else None
    params = vllm.SamplingParams(
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
    )

    async def one(prompt: list[int]) -> int:
        number = str(next(_request_numbers))
        outputs = [o async for o in llm.generate({"prompt_token_ids": prompt}, params, number, lora_request=lora)]
        return len(outputs[-1].outputs[0].token_ids)

    prompts = _prompts()
    started = time.perf_counter()
    counts = await asyncio.gather(*map(one, prompts))
    return sum(counts) / (time.perf_counter() - started)


@functools.cache
def _write_adapter() -> str:
    """A random adapter of rank 16 on every linear layer, as a PEFT folder. Made in the engine that sessions use."""
    from raysessions.actors.engines.adapter_files import AdapterFiles
    from raysessions.actors.engines.deepspeed import DeepSpeedEngine
    from raysessions.actors.protocol import Seat
    from raysessions.config import LoraConfig

    engine = DeepSpeedEngine(local_folder(BASE_MODEL), rs.TrainingConfig(), Seat(0, 1, 0, 1, "127.0.0.1", 29555))
    engine.add_session("bench", LoraConfig(rank=16, alpha=32, seed=0))
    return str(AdapterFiles().write(1, engine.export_adapter("bench")))


_request_numbers = itertools.count()
_rng = np.random.default_rng(0)


def _prompts() -> list[list[int]]:
    """New ones at every call, so that no prefix is cached."""
    return _rng.integers(3, 49_000, (REQUESTS, PROMPT_TOKENS)).tolist()


def _in_a_process(engine: str) -> dict[str, list[float]]:
    command = [sys.executable, str(Path(__file__)), "--engine", engine]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{engine}: {done.stderr[-3000:]}")
    speeds = json.loads(done.stdout.strip().splitlines()[-1])
    for name, values in speeds.items():
        print(f"sample: {name}: {np.median(values):.0f} tokens/s", flush=True)
    return speeds


if __name__ == "__main__":
    main()
