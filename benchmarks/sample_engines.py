"""The engines that bench_sample.py compares, each in a process of its own that measures when told to.

A process reads one JSON object for each line of input, {"measure": NAME, …}, and prints the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil

import raysessions as rs
from raysessions.models import local_folder

BASE_MODEL = "smollm2-135m-instruct"
PROMPT_TOKENS = 36
SAMPLING = rs.SamplingConfig().for_rank(16)
SHARE = {"actor_options": {"num_cpus": 0.5}}
ANSWER = "answer: "
CLIENTS = ("client", "two_replicas", "one_version", "four_versions", "merged")
BARE = ("bare", "defaults", "stock_adapter")


@contextlib.contextmanager
def engine_process(engine: str) -> Iterator[Callable[..., Any]]:
    """A process with one engine, loaded. Yields a function that lets it measure.

    A bare engine is stopped while others measure: idle processes look around a hundred times a second, and every look takes a
    core from an engine that computes on all. Ray's cannot be stopped: it would miss its own health checks.
    """
    command = [sys.executable, __file__, engine]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None
    pauses = engine in BARE

    def measure(name: str, **arguments: Any) -> Any:
        if pauses:
            _signal_all(process.pid, signal.SIGCONT)
        process.stdin.write(json.dumps({"measure": name, **arguments}) + "\n")
        process.stdin.flush()
        answer = _answer(process)
        if pauses:
            _signal_all(process.pid, signal.SIGSTOP)
        return answer

    try:
        _answer(process)
        if pauses:
            _signal_all(process.pid, signal.SIGSTOP)
        yield measure
    finally:
        _signal_all(process.pid, signal.SIGCONT)
        process.stdin.close()
        process.wait()


def _signal_all(pid: int, number: int) -> None:
    """To a process and all that come from it."""
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _answer(process: Any) -> Any:
    """What the process prints next of ours: vLLM prints too."""
    for line in process.stdout:
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise SystemExit("sample: an engine ended before it answered; its error stands above.")


def serve(engine: str) -> None:
    """Loads the engine, says so, and measures once for each line of input."""
    with contextlib.ExitStack() as stack:
        measures = _client(engine, stack) if engine in CLIENTS else _vllm(engine, stack)
        print(f"{ANSWER}0", flush=True)
        for line in sys.stdin:
            arguments = json.loads(line)
            print(f"{ANSWER}{json.dumps(measures[arguments.pop('measure')](**arguments))}", flush=True)


# Ours, by way of SamplingClient


def _client(engine: str, stack: contextlib.ExitStack) -> dict[str, Callable[..., Any]]:
    config = SAMPLING.model_copy(update={"num_replicas": 2, **SHARE} if engine == "two_replicas" else SHARE)
    service = stack.enter_context(rs.ServiceClient(sampling=config, training=rs.TrainingConfig(**SHARE)))
    if engine in ("client", "two_replicas"):
        samplers = [service.create_sampling_client(base_model=BASE_MODEL)]
    else:
        training = stack.enter_context(service.create_lora_training_client(BASE_MODEL, rank=16, seed=0))
        count = 4 if engine == "four_versions" else 1
        samplers = [training.save_weights_and_get_sampling_client(f"v{i}") for i in range(count)]
        if engine == "merged":
            samplers = [service.create_sampling_client(samplers[0].version, merged=True)]
    return {
        "speed": functools.partial(_client_speed, samplers),
        "latency": functools.partial(_client_latency, samplers[0]),
        "turns": functools.partial(_turns, samplers[0]),
        "router": functools.partial(_router_seconds, samplers[0]),
    }


def _client_speed(samplers: list[rs.SamplingClient], requests: int, new_tokens: int) -> float:
    """Tokens per second; the versions take the requests in turn."""
    params = rs.SamplingParams(max_tokens=new_tokens, stop=[])
    prompts = [rs.ModelInput.from_ints(prompt) for prompt in _prompts(requests)]
    started = time.perf_counter()
    futures = [sampler.sample(prompt, 1, params) for sampler, prompt in zip(itertools.cycle(samplers), prompts, strict=False)]
    count = sum(len(future.result().sequences[0].tokens) for future in futures)
    return count / (time.perf_counter() - started)


def _client_latency(sampler: rs.SamplingClient, repeats: int) -> float:
    """Median seconds of a request for one token, sent when the last has been answered."""
    params = rs.SamplingParams(max_tokens=1, stop=[])
    return _median(lambda prompt: sampler.sample(rs.ModelInput.from_ints(prompt), 1, params).result(), repeats)


def _turns(sampler: rs.SamplingClient, conversations: int, prompt_tokens: int) -> list[list[float]]:
    """Seconds to the first token of a conversation's first turn, and of a second one that adds 64 tokens."""
    params = rs.SamplingParams(max_tokens=1, stop=[])
    prompts = [_rng.integers(3, 49_000, prompt_tokens).tolist() for _ in range(conversations)]

    def first_token(prompt: list[int]) -> float:
        started = time.perf_counter()
        sampler.sample(rs.ModelInput.from_ints(prompt), 1, params).result()
        return time.perf_counter() - started

    first = [first_token(prompt) for prompt in prompts]
    return [first, [first_token([*prompt, *range(100, 164)]) for prompt in prompts]]


def _router_seconds(sampler: rs.SamplingClient, requests: int) -> float:
    """Seconds of a core that the pool's process takes for a request, with all of them in flight."""
    (pool,) = (p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::SamplingPool"))
    before = sum(pool.cpu_times()[:2])
    _client_speed([sampler], requests, 1)
    return (sum(pool.cpu_times()[:2]) - before) / requests


# vLLM alone


def _vllm(engine: str, stack: contextlib.ExitStack) -> dict[str, Callable[..., Any]]:
    loop = asyncio.new_event_loop()

    async def start() -> Any:
        return _start_vllm(engine)

    llm = loop.run_until_complete(start())
    stack.callback(llm.shutdown)
    generate = _generate(llm, with_adapter=engine == "stock_adapter")

    def speed(requests: int, new_tokens: int) -> float:
        async def all_of_them() -> list[int]:
            return await asyncio.gather(*(generate(prompt, new_tokens) for prompt in _prompts(requests)))

        started = time.perf_counter()
        return sum(loop.run_until_complete(all_of_them())) / (time.perf_counter() - started)

    def latency(repeats: int) -> float:
        return _median(lambda prompt: loop.run_until_complete(generate(prompt, 1)), repeats)

    return {"speed": speed, "latency": latency}


def _start_vllm(engine: str) -> Any:
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    from raysessions.actors.engines.vllm_start import engine_arguments, start

    arguments = engine_arguments(local_folder(BASE_MODEL), SAMPLING)
    if engine == "bare":
        return start(arguments)
    os.environ["VLLM_PLUGINS"] = "none"
    for ours in ("worker_extension_cls", "ir_op_priority", "distributed_executor_backend"):
        arguments.pop(ours)
    if engine == "defaults":
        os.environ.pop("VLLM_CPU_OMP_THREADS_BIND")
        arguments = {key: arguments[key] for key in ("model", "dtype", "kv_cache_memory_bytes")}
    return AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments))


def _generate(llm: Any, with_adapter: bool) -> Callable[..., Any]:
    import vllm
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("bench/v1", 1, _write_adapter()) if with_adapter else None
    numbers = itertools.count()

    async def generate(prompt: list[int], new_tokens: int) -> int:
        """Returns how many tokens were sampled."""
        params = vllm.SamplingParams(
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        request_id = str(next(numbers))
        outputs = [o async for o in llm.generate({"prompt_token_ids": prompt}, params, request_id, lora_request=lora)]
        return len(outputs[-1].outputs[0].token_ids)

    return generate


def _write_adapter() -> str:
    """A random adapter of rank 16 on every linear layer, as a PEFT folder. Made in the engine that sessions use."""
    from raysessions.actors.engines.adapter_files import AdapterFiles
    from raysessions.actors.engines.deepspeed import DeepSpeedEngine
    from raysessions.actors.protocol import Seat
    from raysessions.config import LoraConfig

    engine = DeepSpeedEngine(local_folder(BASE_MODEL), rs.TrainingConfig(), Seat(0, 1, 0, 1, "127.0.0.1", 29555))
    engine.add_session("bench", LoraConfig(rank=16, alpha=32, seed=0))
    return str(AdapterFiles().write(1, engine.export_adapter("bench")))


_rng = np.random.default_rng(0)


def _prompts(count: int) -> list[list[int]]:
    """New ones at every call, so that no prefix is cached."""
    return _rng.integers(3, 49_000, (count, PROMPT_TOKENS)).tolist()


def _median(request: Callable[[list[int]], Any], repeats: int) -> float:
    times = []
    for prompt in _prompts(repeats + 3):
        started = time.perf_counter()
        request(prompt)
        times.append(time.perf_counter() - started)
    return float(np.median(times[3:]))


if __name__ == "__main__":
    serve(sys.argv[1])
