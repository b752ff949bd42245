"""A run through which random actors are killed has the losses of one that is left alone. `make chaos` is the long form."""

from __future__ import annotations

from scripts import run_benchmark


def test_killing_random_actors_changes_no_loss(tiny_model, tmp_path):
    arguments = {"--steps": 3, "--kill-every-s": 15, "--max-kills": 3, "--base-model": tiny_model, "--seed": 4}
    flat = [item for pair in arguments.items() for item in pair]
    said = run_benchmark("chaos", *flat, results=tmp_path, timeout_s=420)
    assert said.count("chaos: killed") == 3
