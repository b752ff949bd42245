"""The examples run, two steps each, on a cluster that is already there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ray

EXAMPLES = Path(__file__).parent.parent / "examples"


def _run(name: str, *arguments: str) -> str:
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, str(EXAMPLES / name), "--address", address, "--steps", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_arithmetic_grpo_prints_a_row_a_step_and_draws_its_curve(resident, tiny_model, tmp_path):
    plot = tmp_path / "reward.png"
    output = _run("arithmetic_grpo.py", "--base-model", str(tiny_model), "--plot", str(plot))
    rows = [line for line in output.splitlines() if line.count("|") == 9]
    assert [row.split("|")[0].strip() for row in rows] == ["step", "1", "2"]
    assert "Held-out accuracy" in output
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_sft_lowers_its_loss_and_answers_before_and_after(resident, tiny_model):
    output = _run("sft.py", "--base-model", str(tiny_model))
    losses = [float(line.split("|")[1]) for line in output.splitlines() if line.count("|") == 2 and "step" not in line]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert "Before:" in output
    assert "After:" in output


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Two and two?", "completion": "Four."},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    ],
)
def test_sft_takes_a_file(resident, tiny_model, tmp_path, row):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert "Loss per token" in _run("sft.py", "--base-model", str(tiny_model), "--data", str(path))


def test_the_grpo_loop_stays_short():
    assert len((EXAMPLES / "arithmetic_grpo.py").read_text().splitlines()) <= 120
