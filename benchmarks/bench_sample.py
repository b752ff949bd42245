"""Sampled tokens per second: 64 requests of 64 tokens, each to a prompt of 36 random tokens.

Engines that are compared live at the same time, each in a process of its own, and take turns, so that a slow minute of the
machine hits all alike: SamplingClient, a bare AsyncLLM with the same arguments, and vLLM's defaults on this CPU; then
SamplingClient with an adapter, and stock LoRA with the same binding.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from measure import report, summary

import raysessions as rs
from raysessions.models import local_folder

BASE_MODEL = "smollm2-135m-instruct"
REQUESTS, NEW_TOKENS, PROMPT_TOKENS = 64, 64, 36
SAMPLING = rs.SamplingConfig().for_rank(16)
COMPARED = {("client", "bare", "defaults"): 5, ("client_adapter", "stock_adapter"): 2}
"""Engines that take turns, and how often."""
ENGINES = [engine for engines in COMPARED for engine in engines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engine", choices=ENGINES, help="load this one, then measure and print its speed for each line of input"
    )
    engine = parser.parse_args().engine
    if engine:
        serve(engine)
        return
    speed: dict[str, list[float]] = {}
    for engines, repeats in COMPARED.items():
        speed |= take_turns(engines, repeats)
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


def take_turns(engines: Sequence[str], repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each repeat, after one to warm up."""
    speeds: dict[str, list[float]] = {engine: [] for engine in engines}
    with contextlib.ExitStack() as stack:
        processes = {engine: stack.enter_context(_process(engine)) for engine in engines}
        for _ in range(repeats + 1):
            for engine, process in processes.items():
                process.stdin.write("measure\n")
                process.stdin.flush()
                speeds[engine].append(_answer(process))
                print(f"sample: {engine}: {speeds[engine][-1]:.0f} tokens/s", flush=True)
    return {engine: values[1:] for engine, values in speeds.items()}


@contextlib.contextmanager
def _process(engine: str) -> Iterator[Any]:
    """A process with one engine, loaded."""
    command = [sys.executable, __file__, "--engine", engine]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        _answer(process)
        yield process
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait()


def _answer(process: Any) -> float:
    """What the process prints next of ours: vLLM prints too."""
    for line in process.stdout:
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise SystemExit("sample: an engine ended before it answered; its error stands above.")


ANSWER = "tokens/s: "


def serve(engine: str) -> None:
    """Loads the engine, says so, and measures once for each line of input."""
    with contextlib.ExitStack() as stack:
        speed = (_client if engine.startswith("client") else _vllm)(engine, stack)
        print(f"{ANSWER}0", flush=True)
        for _ in sys.stdin:
            print(f"{ANSWER}{speed()}", flush=True)


def _client(engine: str, stack: contextlib.ExitStack) -> Callable[[], float]:
    service = stack.enter_context(rs.ServiceClient(sampling=SAMPLING))
    if engine == "client":
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
    else:
        training = stack.enter_context(service.create_lora_training_client(BASE_MODEL, rank=16, seed=0))
        sampler = training.save_weights_and_get_sampling_client("start")
    return lambda: _client_speed(sampler)


def _vllm(engine: str, stack: contextlib.ExitStack) -> Callable[[], float]:
    loop = asyncio.new_event_loop()

    async def start() -> Any:
        return _start_vllm(engine)

    llm = loop.run_until_complete(start())
    stack.callback(llm.shutdown)
    return lambda: loop.run_until_complete(_vllm_speed(llm, with_adapter=engine == "stock_adapter"))


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
        arguments.pop("ir_op_priority")
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


if __name__ == "__main__":
    main()
