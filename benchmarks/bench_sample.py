"""Sampled tokens per second: 64 requests of 64 tokens, each to a prompt of 36 random tokens.

Five engines, one after the other, each warm: through SamplingClient (with and without adapter), a bare AsyncLLM with the same
arguments, vLLM's defaults on this CPU, and stock LoRA with the same binding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from measure import report, seconds, summary

import raysessions as rs
from raysessions.models import local_folder

BASE_MODEL = "smollm2-135m-instruct"
REQUESTS, NEW_TOKENS, PROMPT_TOKENS = 64, 64, 36
REPEATS = 4
SAMPLING = rs.SamplingConfig().for_rank(16)
ENGINES = ("client", "client_adapter", "bare", "defaults", "stock_adapter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, help="measure this one only and print JSON")
    engine = parser.parse_args().engine
    if engine:
        print(json.dumps(measure(engine)))
        return
    speed = {engine: _in_a_process(engine) for engine in ENGINES}
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


def measure(engine: str) -> list[float]:
    """Tokens per second of each repeat."""
    if engine in ("client", "client_adapter"):
        return _measure_client(with_adapter=engine == "client_adapter")
    return asyncio.run(_measure_vllm(engine))


def _measure_client(with_adapter: bool) -> list[float]:
    with (
        rs.ServiceClient(sampling=SAMPLING) as service,
        service.create_lora_training_client(BASE_MODEL, rank=16, seed=0) as training,
    ):
        create = training.save_weights_and_get_sampling_client if with_adapter else training.create_sampling_client
        sampler = create()
        params = rs.SamplingParams(max_tokens=NEW_TOKENS, stop=[])

        def run() -> None:
            futures = [sampler.sample(rs.ModelInput.from_ints(prompt), 1, params) for prompt in _prompts()]
            assert sum(len(future.result().sequences[0].tokens) for future in futures) == REQUESTS * NEW_TOKENS

        run()
        return [REQUESTS * NEW_TOKENS / seconds(run) for _ in range(REPEATS)]


async def _measure_vllm(engine: str) -> list[float]:
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from raysessions.actors.engines.vllm import engine_arguments

    arguments = engine_arguments(local_folder(BASE_MODEL), SAMPLING)
    lora = None
    if engine == "defaults":
        os.environ.pop("VLLM_CPU_OMP_THREADS_BIND")
        arguments = {key: arguments[key] for key in ("model", "dtype", "kv_cache_memory_bytes")}
    elif engine == "stock_adapter":
        os.environ["VLLM_PLUGINS"] = "none"
        arguments.pop("worker_extension_cls")
        lora = LoRARequest("bench/v1", 1, _write_adapter())
    llm = AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments))
    params = vllm.SamplingParams(
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
    )

    async def one(number: str, prompt: list[int]) -> int:
        outputs = [o async for o in llm.generate({"prompt_token_ids": prompt}, params, number, lora_request=lora)]
        return len(outputs[-1].outputs[0].token_ids)

    async def run(repeat: int) -> float:
        started = asyncio.get_running_loop().time()
        counts = await asyncio.gather(*(one(f"{repeat}-{i}", prompt) for i, prompt in enumerate(_prompts())))
        assert sum(counts) == REQUESTS * NEW_TOKENS
        return REQUESTS * NEW_TOKENS / (asyncio.get_running_loop().time() - started)

    repeats = 2 if engine == "stock_adapter" else REPEATS  # a minute each
    speeds = [await run(repeat) for repeat in range(repeats + 1)]
    llm.shutdown()
    return speeds[1:]


def _write_adapter() -> str:
    """A random adapter of rank 16 on every linear layer, as a PEFT folder. Made in the engine that sessions use."""
    from raysessions.actors.engines.adapter_files import AdapterFiles
    from raysessions.actors.engines.deepspeed import DeepSpeedEngine
    from raysessions.config import LoraConfig

    engine = DeepSpeedEngine(local_folder(BASE_MODEL), rs.TrainingConfig(), master_port=29555)
    engine.add_session("bench", LoraConfig(rank=16, alpha=32, seed=0))
    return str(AdapterFiles().write(1, engine.export_adapter("bench")))


_rng = np.random.default_rng(0)


def _prompts() -> list[list[int]]:
    """New ones at every call, so that no prefix is cached."""
    return _rng.integers(3, 49_000, (REQUESTS, PROMPT_TOKENS)).tolist()


def _in_a_process(engine: str) -> list[Any]:
    command = [sys.executable, str(Path(__file__)), "--engine", engine]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{engine}: {done.stderr[-3000:]}")
    speeds = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"sample: {engine}: {np.median(speeds):.0f} tokens/s", flush=True)
    return speeds


if __name__ == "__main__":
    main()
