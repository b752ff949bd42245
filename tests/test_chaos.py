"""A run through which random actors are killed has the losses of one that is left alone. `make chaos` is the long form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "chaos.py"


def test_killing_random_actors_changes_no_loss(tiny_model, tmp_path):
    arguments = ["--steps", "3", "--kill-every-s", "5", "--min-kills", "3", "--base-model", str(tiny_model), "--seed", "3"]
    environment = {**os.environ, "RAYSESSIONS_BENCHMARK_RESULTS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=400, env=environment
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert "MISSED" not in done.stdout, done.stdout
    assert (tmp_path / "chaos.json").exists()
