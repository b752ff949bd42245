"""Sampled tokens per second: requests to prompts of 36 random tokens, SmolLM2-135M.

Engines that are compared live at the same time, each in a process of its own, and take turns, so that a slow minute of the
machine hits all alike:

- a bare AsyncLLM with our settings against vLLM's defaults on this CPU, and SamplingClient against the former;
- an adapter with our LoRA and with stock LoRA;
- one version, four at once, and one merged into the base;
- one replica and two on the same cores, with 64 and 512 requests in flight;
- a conversation's second turn against its first.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from measure import report, summary
from sample_engines import engine_process

FEW = {"requests": 64, "new_tokens": 64}
MANY = {"requests": 512, "new_tokens": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("engines", "pool"), help="one part alone; each writes its own results")
    part = parser.parse_args().part
    if part != "pool":
        measure_engines()
    if part != "engines":
        measure_pool()


def measure_engines() -> None:
    """One engine against another."""
    alone, _ = take_turns(("bare", "defaults"), FEW, repeats=5)
    base, latency = take_turns(("client", "bare"), FEW, repeats=5, latencies=("client", "bare"))
    adapter, _ = take_turns(("one_version", "stock_adapter"), FEW, repeats=2)
    report(
        "sample",
        {
            **summaries(alone, "alone"),
            **summaries(base, "beside_ray"),
            **summaries(adapter, "with_adapter"),
            "latency_s": latency,
        },
        {
            "through SamplingClient, over a bare AsyncLLM": (ratio(base, "client", "bare"), 0.95),
            "our settings, over vLLM's defaults": (ratio(alone, "bare", "defaults"), 1.5),
            "with adapter, grouped over stock LoRA": (ratio(adapter, "one_version", "stock_adapter"), 3.0),
            "a request's way to the engine and back, ms": (1000 * (latency["client"] - latency["bare"]), -15.0),
        },
    )


def measure_pool() -> None:
    """Versions, replicas and turns of conversations."""
    versions, _ = take_turns(("one_version", "four_versions", "merged"), FEW, repeats=2)
    few, _ = take_turns(("client", "two_replicas"), FEW, repeats=2)
    many, _ = take_turns(("client", "two_replicas"), MANY, repeats=2)
    with engine_process("two_replicas") as measure:
        measure("speed", **FEW)
        first, second = measure("turns", conversations=6, prompt_tokens=2000)
        router_s = measure("router", requests=512)
    report(
        "sample_pool",
        {
            **summaries(versions, "versions"),
            **summaries(few, "64_requests"),
            **summaries(many, "512_requests"),
            "first_turn_s": summary(first),
            "second_turn_s": summary(second),
            "router_cpu_s_per_request": router_s,
        },
        {
            "four versions at once, over one": (ratio(versions, "four_versions", "one_version"), 0.6),
            "merged, over an adapter": (ratio(versions, "merged", "one_version"), 1.1),
            "two replicas over one, same cores, 64 requests": (ratio(few, "two_replicas", "client"), 0.7),
            "two replicas over one, same cores, 512 requests": (ratio(many, "two_replicas", "client"), 0.7),
            "first token of a second turn over the first's, 2,000 tokens": (float(np.median(second) / np.median(first)), -0.3),
            "router's processor time a request, ms": (1000 * router_s, -5.0),
        },
    )


def take_turns(
    engines: Sequence[str], load: dict[str, int], repeats: int, latencies: Sequence[str] = ()
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Tokens per second of each repeat, after one to warm up; and the seconds of a single token's request."""
    speeds: dict[str, list[float]] = {engine: [] for engine in engines}
    with contextlib.ExitStack() as stack:
        processes: dict[str, Any] = {engine: stack.enter_context(engine_process(engine)) for engine in engines}
        for _ in range(repeats + 1):
            for engine, measure in processes.items():
                speeds[engine].append(measure("speed", **load))
                print(f"sample: {engine}, {load['requests']} requests: {speeds[engine][-1]:.0f} tokens/s", flush=True)
        latency = {engine: processes[engine]("latency", repeats=50) for engine in latencies}
    return {engine: values[1:] for engine, values in speeds.items()}, latency


def summaries(speeds: dict[str, list[float]], what: str) -> dict[str, Any]:
    return {f"{engine}_tokens_per_s_{what}": summary(values) for engine, values in speeds.items()}


def ratio(speeds: dict[str, list[float]], one: str, other: str) -> float:
    return float(np.median(speeds[one]) / np.median(speeds[other]))


if __name__ == "__main__":
    main()
