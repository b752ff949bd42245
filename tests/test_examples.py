"""The examples run, two steps each, on a cluster that is already there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ray

EXAMPLES = Path(__file__).parent.parent / "examples"
SOLUTIONS = EXAMPLES.parent.parent / "shared" / "data" / "gsm8k_model_solutions" / "example_model_solutions.jsonl"
"""Optional, beside the repository."""


def _run(name: str, *arguments: str) -> str:
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, str(EXAMPLES / name), "--address", address, "--steps", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_arithmetic_grpo_prints_a_row_a_step_and_draws_its_curve(resident, tiny_model, tmp_path):
    plot = tmp_path / "reward.png"
    files = ["--plot", str(plot), "--metrics", str(tmp_path / "metrics.jsonl")]
    output = _run("arithmetic_grpo.py", "--base-model", str(tiny_model), *files)
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


@pytest.mark.parametrize("reference", ["forward", "sampler"])
def test_dpo_prefers_the_better_answers_from_either_reference(resident, tiny_model, reference):
    output = _run("dpo.py", "--base-model", str(tiny_model), "--reference", reference, "--learning-rate", "5e-3")
    rows = [line.split("|") for line in output.splitlines() if line.count("|") == 5]
    (_, first, *_), (_, second, *_) = rows[1:]
    assert float(first) == pytest.approx(0.693, abs=2e-3)  # log 2: before the first step no answer has gained
    assert float(second) < float(first)
    assert "Held-out pairs whose better answer gained more" in output


def test_dpo_takes_a_file_of_real_preferences(resident, tiny_model, tmp_path):
    """Right and wrong solutions of grade-school problems, where the data set is at hand; else two rows of the same shape."""
    path = tmp_path / "pairs.jsonl"
    with path.open("w") as lines:
        for row in _preferences():
            lines.write(json.dumps(row) + "\n")
    options = ["--data", str(path), "--held-out", "1", "--batch-size", "2"]
    assert "Held-out pairs" in _run("dpo.py", "--base-model", str(tiny_model), *options)


def _preferences() -> list[dict[str, str]]:
    if not SOLUTIONS.exists():
        return [{"prompt": f"{n} + 1?", "chosen": str(n + 1), "rejected": "I do not know."} for n in range(4)]
    rows = []
    for line in SOLUTIONS.read_text().splitlines()[:200]:
        problem = json.loads(line)
        by_outcome = {value["is_correct"]: value["solution"] for value in problem.values() if isinstance(value, dict)}
        if len(by_outcome) == 2:
            rows.append({"prompt": problem["question"], "chosen": by_outcome[True], "rejected": by_outcome[False]})
    return [row for row in rows if max(map(len, row.values())) < 230][:4]


def test_the_grpo_loop_stays_short():
    assert len((EXAMPLES / "arithmetic_grpo.py").read_text().splitlines()) <= 120
