"""Two nodes: ranks and replicas on both, and one of them lost."""

from __future__ import annotations

from scripts import run_benchmark


def test_a_run_on_two_nodes_goes_on_when_one_is_lost(tiny_model, tmp_path):
    run_benchmark("two_nodes", "--base-model", tiny_model, results=tmp_path, timeout_s=420)
