"""A loop that is killed at any step and started again is the run that was not. Conformance E6."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from waiting import wait_for

STEPS = int(os.environ.get("RAYSESSIONS_RESUME_STEPS", "3"))
"""Each is killed once; set 10 for the long form."""
EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic_grpo.py"


def start(tiny_model: Path, folder: Path, run: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, str(EXAMPLE), "--address", ray.get_runtime_context().gcs_address, "--base-model", str(tiny_model),
        "--steps", str(STEPS), "--run", run, "--metrics", str(folder / f"{run}.jsonl"), "--plot", str(folder / "curve.png"),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows(folder: Path, run: str) -> list[dict[str, float]]:
    file = folder / f"{run}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def finish(process: subprocess.Popen[str]) -> None:
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, output[-1500:] + errors[-2500:]


def test_a_run_killed_at_every_step_is_the_run_that_was_not(resident, tiny_model, tmp_path):
    finish(start(tiny_model, tmp_path, "undisturbed"))
    expected = rows(tmp_path, "undisturbed")
    assert len(expected) == STEPS + 1
    for num_rows in range(1, STEPS + 1):
        process = start(tiny_model, tmp_path, "killed")
        wait_for(lambda num_rows=num_rows: len(rows(tmp_path, "killed")) >= num_rows, timeout_s=90)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run was over before it was killed"
    finish(start(tiny_model, tmp_path, "killed"))
    resumed = rows(tmp_path, "killed")
    assert len(resumed) == STEPS + 1
    for row, other in zip(resumed, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-6)
