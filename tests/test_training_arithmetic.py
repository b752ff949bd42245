"""The engine's sums against plain transformers and torch, without Ray. Conformance A1, A2, A3, A6, A7, A10."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datums import arrays, group, loss, supervised
from transformers import AutoModelForCausalLM

from raysessions import LOSSES, AdamParams, Datum, ModelInput
from raysessions.actors.maths.metrics import merge
from raysessions.actors.maths.rows import plan_rows
from raysessions.batch import Batch, pack
from raysessions.config import LoraConfig
from raysessions.errors import EmptyGradientError, SessionError

LENGTHS = (5, 120, 1, 300, 33, 64)


@pytest.fixture(scope="module")
def engine(engine_factory):
    return engine_factory(max_tokens_per_micro_batch=200)


@pytest.fixture
def session(engine):
    """A session whose adapter is random in A and B, so that gradients of both are at work."""
    engine.add_session("s", LoraConfig(rank=8, alpha=16, seed=3))
    _randomise(engine, "s")
    yield "s"
    engine.remove_session("s")


def _randomise(engine, session_id: str, seed: int = 5) -> None:
    weights = engine._adapters[session_id].weights
    weights.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(seed))


def _batch(data, loss_fn: str = "cross_entropy") -> Batch:
    return pack(data, LOSSES[loss_fn], vocab_size=259, context_length=512)


def _gradient(engine, session_id: str, *calls, loss_fn: str = "cross_entropy") -> torch.Tensor:
    """The gradient after forward_backward of each of `calls`; the session is left without one."""
    for data in calls:
        engine.run_loss(session_id, _batch(data, loss_fn), loss(loss_fn), backward=True)
    adapter = engine._adapters[session_id]
    adapter.has_gradient = False
    return adapter.gradient.clone()


def _reference(engine, tiny_model, session_id: str, data) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Logprobs and gradient of the weighted cross entropy by transformers, one unbatched datum at a time, with the LoRA
    product merged into the weights by hand and differentiated by autograd."""
    adapter = engine._adapters[session_id]
    flat = adapter.weights.detach().clone().requires_grad_()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    parameters = dict(model.named_parameters())
    begin, merged = 0, {}
    shapes = [(name, parameter.shape) for name, parameter in adapter._parameters]
    for (name_a, shape_a), (_, shape_b) in zip(shapes[::2], shapes[1::2], strict=True):
        a = flat[begin : begin + shape_a.numel()].view(shape_a)
        begin += shape_a.numel()
        b = flat[begin : begin + shape_b.numel()].view(shape_b)
        begin += shape_b.numel()
        target = name_a.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        merged[target] = parameters[target].detach() + adapter.lora.alpha / adapter.lora.rank * (b @ a)
    logprobs, total = [], torch.zeros(())
    for datum in map(arrays, data):
        tokens, targets = torch.tensor(datum["tokens"])[None], torch.tensor(datum["target_tokens"])
        logits = torch.func.functional_call(model, merged, (tokens,), {"use_cache": False}).logits[0]
        logprobs.append(logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1))
        total = total - (torch.tensor(datum["weights"]) * logprobs[-1]).sum()
    return [part.detach() for part in logprobs], torch.autograd.grad(total, flat)[0]


def _logprobs(result) -> np.ndarray:
    """In the order given."""
    logprobs = np.empty_like(result.logprobs)
    logprobs[result.positions] = result.logprobs
    return logprobs


def _close(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-5) -> bool:
    return ((a - b).norm() / b.norm()).item() < rtol


def test_logprobs_and_gradient_equal_an_unbatched_transformers_forward(engine, session, tiny_model):
    data = supervised(LENGTHS)
    logprobs, gradient = _reference(engine, tiny_model, session, data)
    ours = _logprobs(engine.run_loss(session, _batch(data), loss(), backward=True))
    for begin, reference in zip(np.cumsum([0, *LENGTHS[:-1]]), logprobs, strict=True):
        np.testing.assert_allclose(ours[begin : begin + len(reference)], reference, atol=2e-5)
    assert _close(engine._adapters[session].gradient, gradient)
    engine._adapters[session].has_gradient = False


def test_two_calls_add_up_to_one_call_and_to_one_call_per_datum(engine, session):
    a, b = supervised(LENGTHS[:3]), supervised(LENGTHS[3:], seed=1)
    together = _gradient(engine, session, a + b)
    assert _close(_gradient(engine, session, a, b), together)
    assert _close(_gradient(engine, session, *([datum] for datum in a + b)), together)


@pytest.mark.parametrize("budget", [1, 50, 333, 10_000])
def test_any_micro_batch_budget_gives_the_same_gradient_and_logprobs(engine_factory, budget):
    data = supervised((1, 300, 17, 150, 40)) + supervised((2, 16, 299), seed=9)
    results = []
    for max_tokens in (200, budget):
        engine = engine_factory(max_tokens_per_micro_batch=max_tokens)
        engine.add_session("s", LoraConfig(rank=4, alpha=8, seed=0))
        _randomise(engine, "s")
        result = engine.run_loss("s", _batch(data), loss(), backward=True)
        results.append((engine._adapters["s"].gradient.clone(), _logprobs(result), merge(result.metrics)["loss:sum"]))
    (gradient, logprobs, total), (other_gradient, other_logprobs, other_total) = results
    assert _close(other_gradient, gradient)
    np.testing.assert_allclose(other_logprobs, logprobs, atol=2e-5)
    assert other_total == pytest.approx(total, rel=1e-6)


def test_a_shared_prompt_computed_once_changes_no_logprob_and_no_gradient(engine, session, monkeypatch):
    data = group(40, (5, 9, 30, 1, 7, 7, 2, 12)) + group(25, (3, 60), seed=2) + group(300, (20, 4), seed=3)
    batch = _batch(data, "importance_sampling")
    shared = _logprobs(engine.run_loss(session, batch, loss("importance_sampling"), backward=False))
    shared_gradient = _gradient(engine, session, data, loss_fn="importance_sampling")
    monkeypatch.setattr("raysessions.actors.maths.rows.MIN_SHARED_TOKENS", 10**9)
    apart = _logprobs(engine.run_loss(session, batch, loss("importance_sampling"), backward=False))
    np.testing.assert_allclose(shared, apart, atol=2e-5)
    assert _close(shared_gradient, _gradient(engine, session, data, loss_fn="importance_sampling"))


def test_many_targets_a_position_equal_as_many_datums(engine, session):
    """Top-K distillation: K targets with weights at each position are K datums of one target, their logits made once."""
    rng = np.random.default_rng(0)
    data, apart = [], []
    for length in (5, 120, 1):
        tokens = ModelInput.from_ints(rng.integers(3, 259, length).tolist())
        targets, weights = rng.integers(3, 259, (length, 4)), rng.normal(size=(length, 4)).astype(np.float32)
        weights[rng.random((length, 4)) < 0.3] = 0.0
        data.append(Datum(tokens, {"target_tokens": targets, "weights": weights}))
        apart += [Datum(tokens, {"target_tokens": targets[:, k], "weights": weights[:, k]}) for k in range(4)]
    together = _logprobs(engine.run_loss(session, _batch(data), loss(), backward=False))
    one_by_one = _logprobs(engine.run_loss(session, _batch(apart), loss(), backward=False))
    assert together.shape == (126, 4)
    np.testing.assert_allclose(together, np.stack([_column(one_by_one, k) for k in range(4)], axis=1), atol=2e-5)
    assert _close(_gradient(engine, session, data), _gradient(engine, session, apart))


def _column(flat: np.ndarray, k: int) -> np.ndarray:
    """Target k of all positions, from datums of 5, 120 and 1 tokens each given four times in a row."""
    return np.concatenate([flat[4 * begin + k * length : 4 * begin + (k + 1) * length] for begin, length in SPANS])


SPANS = ((0, 5), (5, 120), (125, 1))


def test_gradient_checkpointing_changes_no_gradient_and_every_b_learns(engine, session, engine_factory):
    data = supervised(LENGTHS)
    checkpointed = engine_factory(max_tokens_per_micro_batch=200, gradient_checkpointing=True)
    checkpointed.add_session("s", LoraConfig(rank=8, alpha=16, seed=3))
    _, b = _halves(checkpointed, "s", _gradient(checkpointed, "s", data))
    assert len(b) == 14
    assert all(gradient.abs().max() > 0 for gradient in b)
    _randomise(checkpointed, "s")
    assert _close(_gradient(checkpointed, "s", data), _gradient(engine, session, data))


def test_gradient_checkpointing_keeps_less(engine_factory):
    data = supervised((200,))
    kept = {}
    for is_on in (False, True):
        engine = engine_factory(gradient_checkpointing=is_on)
        engine.add_session("s", LoraConfig(rank=8, alpha=16, seed=3))
        kept[is_on] = 0

        def keep(tensor, is_on=is_on):
            kept[is_on] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            engine.run_loss("s", _batch(data), loss(), backward=False)
            row = plan_rows(_batch(data), 512)[0]
            adapter = engine._activate("s")
            adapter.collect_into(engine._scratch)
            trained = torch.ones(200, dtype=torch.bool)
            engine._model(row, row.source, _batch(data).target_tokens, trained)
            adapter.stop_collecting()
    assert kept[True] < 0.25 * kept[False]


def _halves(engine, session_id: str, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parts of a flat array that belong to the LoRA A's, and to the B's."""
    sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    begin = 0
    for name, parameter in engine._adapters[session_id]._parameters:
        sides["lora_B" in name].append(flat[begin : begin + parameter.numel()])
        begin += parameter.numel()
    return sides


def test_optim_step_equals_torch_adamw_with_settings_that_change_between_steps(engine, session):
    adapter = engine._adapters[session]
    reference = torch.nn.Parameter(adapter.weights.detach().clone())
    optimizer = torch.optim.AdamW([reference], lr=1.0)
    settings = [
        AdamParams(learning_rate=1e-2),
        AdamParams(learning_rate=3e-3, beta1=0.5, beta2=0.9, eps=1e-6, weight_decay=0.1),
        AdamParams(learning_rate=1e-3, beta1=0.95, weight_decay=0.01),
    ]
    for step, adam in enumerate(settings):
        engine.run_loss(session, _batch(supervised(LENGTHS, seed=step)), loss(), backward=True)
        reference.grad = adapter.gradient.clone()
        optimizer.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        optimizer.step()
        metrics = engine.optim_step(session, adam)
        assert metrics["grad_norm:max"] == pytest.approx(reference.grad.norm().item(), rel=1e-5)
        torch.testing.assert_close(adapter.weights.data, reference.data, rtol=1e-5, atol=1e-7)
    assert metrics["step:max"] == 3


def test_clipping_scales_to_the_norm_and_reports_the_norm_before(engine, session):
    adapter = engine._adapters[session]
    full = _gradient(engine, session, supervised(LENGTHS))
    reference = torch.nn.Parameter(adapter.weights.detach().clone())
    # eps as large as the gradient: then AdamW's step depends on the gradient's scale, and clipping shows.
    adam = AdamParams(learning_rate=0.1, eps=1.0, grad_clip_norm=0.5)
    optimizer = torch.optim.AdamW([reference], lr=0.1, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0)
    reference.grad = full * (0.5 / full.norm())
    optimizer.step()
    engine.run_loss(session, _batch(supervised(LENGTHS)), loss(), backward=True)
    assert engine.optim_step(session, adam)["grad_norm:max"] == pytest.approx(full.norm().item(), rel=1e-5)
    torch.testing.assert_close(adapter.weights.data, reference.data, rtol=1e-5, atol=1e-7)


def test_optim_step_without_a_gradient_is_refused_and_changes_nothing(engine, session):
    before = engine._adapters[session].weights.detach().clone()
    with pytest.raises(EmptyGradientError, match="forward_backward first"):
        engine.optim_step(session, AdamParams())
    engine.run_loss(session, _batch(supervised((4,))), loss(), backward=False)
    with pytest.raises(EmptyGradientError):
        engine.optim_step(session, AdamParams())
    assert torch.equal(engine._adapters[session].weights, before)


def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(engine, session):
    adapter = engine._adapters[session]
    before = adapter.weights.detach().clone()
    extreme = group(10, (5,))
    extreme[0].loss_fn_inputs["logprobs"][:] = -300.0
    engine.run_loss(session, _batch(extreme, "importance_sampling"), loss("importance_sampling"), backward=True)
    with pytest.raises(SessionError, match="nothing was applied"):
        engine.optim_step(session, AdamParams())
    assert torch.equal(adapter.weights, before)
    assert not adapter.has_gradient


def test_a_failed_forward_backward_leaves_the_gradient_as_it_was(engine, session, monkeypatch):
    data = supervised(LENGTHS)
    engine.run_loss(session, _batch(data), loss(), backward=True)
    before = engine._adapters[session].gradient.clone()
    calls = iter(range(100))
    run_row = engine._run_row

    def fail_on_the_third(*args):
        if next(calls) == 2:
            raise MemoryError("out of memory")
        return run_row(*args)

    monkeypatch.setattr(engine, "_run_row", fail_on_the_third)
    with pytest.raises(MemoryError):
        engine.run_loss(session, _batch(data), loss(), backward=True)
    assert torch.equal(engine._adapters[session].gradient, before)
    engine._adapters[session].has_gradient = False


def test_the_frozen_base_is_bit_identical_after_100_steps_and_100_saves(engine, session):
    before = {name: p.clone() for name, p in engine._model.named_parameters() if "lora_" not in name}
    data = supervised((20, 7))
    for _ in range(100):
        engine.run_loss(session, _batch(data), loss(), backward=True)
        engine.optim_step(session, AdamParams(learning_rate=1e-2))
        engine.export_adapter(session)
    after = {name: p for name, p in engine._model.named_parameters() if "lora_" not in name}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_sessions_of_other_rank_and_layers_do_not_touch_each_other(engine, session):
    data = supervised(LENGTHS)
    alone = _gradient(engine, session, data)
    engine.add_session("other", LoraConfig(rank=2, alpha=4, seed=1, train_mlp=False))
    _randomise(engine, "other", seed=8)
    engine.run_loss("other", _batch(data), loss(), backward=True)
    assert torch.equal(_gradient(engine, session, data), alone)
    engine.remove_session("other")
    assert torch.equal(_gradient(engine, session, data), alone)
