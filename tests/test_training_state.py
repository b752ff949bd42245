"""A session's state without Ray: what comes back is what went, bit for bit. Conformance E1 and E2 for one rank."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from datums import loss, supervised

from raysessions import LOSSES, AdamParams, CheckpointMismatchError
from raysessions.actors.protocol import joined
from raysessions.adapter_weights import WEIGHTS_FILE, from_safetensors, to_peft_files
from raysessions.batch import pack
from raysessions.config import LoraConfig
from raysessions.training_state import OPTIMIZER_FILE, TrainingState, from_state_files, to_state_files

LORA = LoraConfig(rank=8, alpha=16, seed=3)
ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.1)


def steps(engine, session_id: str, first: int, count: int) -> list[float]:
    norms = []
    for step in range(first, first + count):
        batch = pack(supervised((20, 7, 50), seed=step), LOSSES["cross_entropy"], vocab_size=259, context_length=512)
        engine.run_loss(session_id, batch, loss(), backward=True)
        norms.append(engine.optim_step(session_id, ADAM)["grad_norm:max"])
    return norms


def state_of(engine, session_id: str) -> TrainingState:
    return copy.deepcopy(joined([engine.export_state(session_id)], LORA.seed))


def weights_of(engine, session_id: str) -> torch.Tensor:
    return engine._adapters[session_id].weights.clone()


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_a_run_continued_from_its_files_equals_one_that_was_not_stopped(engine_factory, zero_stage):
    through = engine_factory(zero_stage=zero_stage)
    through.add_session("s", LORA)
    norms = steps(through, "s", 0, 6)

    first, second = engine_factory(zero_stage=zero_stage), engine_factory(zero_stage=2 - zero_stage)
    first.add_session("s", LORA)
    assert steps(first, "s", 0, 3) == norms[:3]
    files = to_state_files(state_of(first, "s"), "base")
    second.add_session("t", LoraConfig(rank=8, alpha=16, seed=99))
    second.load_state("t", from_state_files(files))
    assert steps(second, "t", 3, 3) == norms[3:]
    assert torch.equal(weights_of(second, "t"), weights_of(through, "s"))
    assert second.num_steps("t") == 6


def test_weights_alone_continue_otherwise(engine_factory):
    engine = engine_factory()
    engine.add_session("s", LORA)
    steps(engine, "s", 0, 3)
    state = state_of(engine, "s")
    for name, start in {"whole": state, "weights": state.without_optimizer()}.items():
        engine.add_session(name, LORA)
        engine.load_state(name, start)
    assert torch.equal(weights_of(engine, "whole"), weights_of(engine, "weights"))
    assert (engine.num_steps("whole"), engine.num_steps("weights")) == (3, 0)
    for name in ("s", "whole", "weights"):
        steps(engine, name, 3, 1)
    assert torch.equal(weights_of(engine, "whole"), weights_of(engine, "s"))
    assert not torch.equal(weights_of(engine, "weights"), weights_of(engine, "s"))


def test_an_accumulated_gradient_comes_back_with_its_rank(engine_factory):
    engine = engine_factory()
    engine.add_session("s", LORA)
    steps(engine, "s", 0, 2)
    batch = pack(supervised((30,), seed=7), LOSSES["cross_entropy"], vocab_size=259, context_length=512)
    engine.run_loss("s", batch, loss(), backward=True)
    part = copy.deepcopy(engine.export_state("s"))
    engine.add_session("t", LORA)
    engine.load_state("t", joined([part], LORA.seed), part.gradient)
    for name in ("s", "t"):
        engine.optim_step(name, ADAM)
    assert torch.equal(weights_of(engine, "s"), weights_of(engine, "t"))


def test_a_state_without_steps_loads(engine_factory):
    engine = engine_factory()
    engine.add_session("s", LORA)
    files = to_state_files(state_of(engine, "s"), "base")
    assert OPTIMIZER_FILE not in files
    engine.add_session("t", LoraConfig(rank=8, alpha=16, seed=99))
    engine.load_state("t", from_state_files(files))
    assert torch.equal(weights_of(engine, "s"), weights_of(engine, "t"))


def test_a_state_is_smaller_than_five_adapters_and_has_no_base_weights(engine_factory):
    engine = engine_factory()
    engine.add_session("s", LORA)
    steps(engine, "s", 0, 1)
    state = state_of(engine, "s")
    files = to_state_files(state, "base")
    adapter_bytes = 4 * engine._adapters["s"].num_parameters
    assert sum(map(len, files.values())) < 5 * adapter_bytes
    names = [name for file in (WEIGHTS_FILE, OPTIMIZER_FILE) for name in from_safetensors(files[file])]
    assert len(names) == 3 * len(state.weights.entries)
    assert all("lora_A" in name or "lora_B" in name for name in names)


@pytest.mark.parametrize("lora", [LoraConfig(rank=4, alpha=16, seed=3), LoraConfig(rank=8, alpha=16, seed=3, train_mlp=False)])
def test_a_state_of_another_shape_is_refused_and_changes_nothing(engine_factory, lora):
    engine = engine_factory()
    engine.add_session("s", LORA)
    steps(engine, "s", 0, 1)
    engine.add_session("other", lora)
    before = weights_of(engine, "other")
    with pytest.raises(CheckpointMismatchError, match="other layers or shapes"):
        engine.load_state("other", state_of(engine, "s"))
    assert torch.equal(weights_of(engine, "other"), before)
    assert engine.num_steps("other") == 0


def test_moments_are_those_that_torch_has(engine_factory):
    """One step with beta1, beta2: exp_avg is (1 - beta1) g, exp_avg_sq is (1 - beta2) g²."""
    engine = engine_factory()
    engine.add_session("s", LORA)
    batch = pack(supervised((20, 7), seed=1), LOSSES["cross_entropy"], vocab_size=259, context_length=512)
    engine.run_loss("s", batch, loss(), backward=True)
    gradient = engine._adapters["s"].gradient.numpy().copy()
    engine.optim_step("s", AdamParams(beta1=0.8, beta2=0.9))
    state = state_of(engine, "s")
    np.testing.assert_allclose(state.moments["exp_avg"], 0.2 * gradient, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(state.moments["exp_avg_sq"], 0.1 * gradient**2, rtol=1e-5, atol=1e-12)


def test_a_peft_folder_in_bfloat16_is_widened_exactly(engine_factory):
    engine = engine_factory()
    engine.add_session("s", LORA)
    steps(engine, "s", 0, 1)
    exported = engine._adapters["s"].export(torch.bfloat16)
    engine.add_session("t", LORA)
    engine.load_state("t", from_state_files(to_peft_files(exported)))
    assert torch.equal(weights_of(engine, "t"), weights_of(engine, "s").bfloat16().float())
