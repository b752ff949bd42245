"""Every ZeRO stage on one and on two ranks against one rank of stage 0, which is itself compared with transformers in
test_training_arithmetic.py. Conformance A1, A2, A6, A9, A10, B1."""

from __future__ import annotations

import pytest
import ranks
import torch

CASES = [(world_size, stage) for world_size in (1, 2) for stage in ranks.STAGES]


@pytest.fixture(scope="module")
def measured(tiny_model):
    """What each world size and stage computed: one dict per rank."""
    of_ranks = {world_size: ranks.run_ranks(world_size, ranks.every_stage, tiny_model) for world_size in (1, 2)}
    return {(world_size, stage): [of_rank[stage] for of_rank in of_ranks[world_size]] for world_size, stage in CASES}


@pytest.fixture(scope="module")
def reference(measured):
    return measured[1, 0][0]


def _close(ours: torch.Tensor, theirs: torch.Tensor, rtol: float = 1e-5) -> bool:
    return ((ours - theirs).norm() / theirs.norm()).item() < rtol


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_two_calls_and_one_call_per_datum_add_up_to_one_call(measured, reference, world_size, stage):
    for rank in measured[world_size, stage]:
        for way in ("together", "two calls", "one call each"):
            assert _close(rank[way], reference["together"]), way


@pytest.mark.parametrize(("world_size", "stage"), CASES)
@pytest.mark.parametrize("what", ["five datums", "one datum", "importance_sampling", "ppo", "gspo"])
def test_every_stage_and_world_size_has_the_same_gradient(measured, reference, world_size, stage, what):
    for rank in measured[world_size, stage]:
        assert _close(rank[what], reference[what])


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_every_stage_and_world_size_has_the_same_logprobs_and_metrics(measured, reference, world_size, stage):
    of_ranks = measured[world_size, stage]
    for rank in of_ranks:
        torch.testing.assert_close(rank["logprobs"], reference["logprobs"], rtol=0, atol=2e-5)
    expected = ranks.merged([reference["metrics"]])
    assert ranks.merged([rank["metrics"] for rank in of_ranks]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert "clip_fraction:mean" in expected


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_every_stage_and_world_size_takes_the_same_optimizer_steps(measured, reference, world_size, stage):
    for rank in measured[world_size, stage]:
        assert _close(rank["steps"]["weights"], reference["steps"]["weights"])
        assert rank["steps"]["norms"] == pytest.approx(reference["steps"]["norms"], rel=1e-5)
        assert torch.equal(rank["steps"]["weights"], measured[world_size, stage][0]["steps"]["weights"])


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_activation_checkpointing_changes_no_gradient_and_every_b_learns(measured, reference, world_size, stage):
    for rank in measured[world_size, stage]:
        assert rank["least B"] > 0
        assert _close(rank["checkpointed"], reference["together"])


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_two_sessions_interleaved_equal_each_alone(measured, world_size, stage):
    for rank in measured[world_size, stage]:
        for name in ranks.SESSIONS:
            ours, alone = rank["interleaved"][name], rank["alone"][name][name]
            assert torch.equal(ours, alone) if world_size == 1 else _close(ours, alone, 1e-6)


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_the_frozen_base_keeps_every_bit(measured, world_size, stage):
    assert all(rank["base unchanged"] for rank in measured[world_size, stage])
