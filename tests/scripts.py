"""Runs a benchmark in a short form. It prints what it holds of its targets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "benchmarks"


def run_benchmark(name: str, *arguments: object, results: Path, timeout_s: float) -> str:
    """Its output; fails unless it meets all its targets. The results file goes to the folder `results`."""
    environment = {**os.environ, "RAYSESSIONS_BENCHMARK_RESULTS": str(results)}
    command = [sys.executable, str(FOLDER / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert "MISSED" not in done.stdout, done.stdout[-3000:]
    assert (results / f"{name}.json").exists()
    return done.stdout
