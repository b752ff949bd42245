"""Each loss, and the logprobs it is given, against plain torch: values and gradients."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from raysessions import LOSSES, LossError, LossSpec
from raysessions.actors.maths.logprobs import CHUNK_TOKENS, target_logprobs
from raysessions.actors.maths.losses import LOSS_FNS
from raysessions.losses import get_loss, resolve_config

Inputs = dict[str, list[float]]


def cross_entropy(lp: torch.Tensor, weights: list[float]) -> torch.Tensor:
    return torch.stack([-w * lp[t] for t, w in enumerate(weights)])


def importance_sampling(lp: torch.Tensor, logprobs: list[float], advantages: list[float], weights: list[float]) -> torch.Tensor:
    terms = zip(logprobs, advantages, weights, strict=True)
    # A token that counts for nothing has no ratio: its logprob may be a placeholder.
    return torch.stack([-w * a * torch.exp(lp[t] - q) if w and a else lp[t] * 0 for t, (q, a, w) in enumerate(terms)])


REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
}

LP = [-0.7, -2.5, -0.01, -9.0, -1.3]
CASES: dict[str, tuple[str, list[float], Inputs]] = {
    "plain": ("cross_entropy", LP, {"weights": [1.0, 1.0, 1.0, 1.0, 1.0]}),
    "fractions and negative": ("cross_entropy", LP, {"weights": [0.25, -1.5, 0.0, 3.0, -0.1]}),
    "weights that sum to 0": ("cross_entropy", LP, {"weights": [1.0, -1.0, 0.5, -0.5, 0.0]}),
    "no weight at all": ("cross_entropy", LP, {"weights": [0.0] * 5}),
    "one token": ("cross_entropy", [-0.4], {"weights": [0.3]}),
    "policy gradient": (
        "importance_sampling",
        LP,
        {"logprobs": [-0.9, -2.0, -0.02, -8.0, -1.3], "advantages": [1.0, -2.0, 0.5, 0.3, -0.7], "weights": [1.0] * 5},
    ),
    "fractional and negative weights": (
        "importance_sampling",
        LP,
        {"logprobs": [-0.9, -2.0, -0.02, -8.0, -1.3], "advantages": [1.0, -2.0, 0.5, 0.3, 0.0], "weights": [0.5, -1, 2, 0, 1]},
    ),
    "policy weights that sum to 0": (
        "importance_sampling",
        LP,
        {"logprobs": [-1.0] * 5, "advantages": [1.0] * 5, "weights": [1.0, -1.0, 0.25, -0.25, 0.0]},
    ),
    "all advantages 0": (
        "importance_sampling",
        LP,
        {"logprobs": [-1.0] * 5, "advantages": [0.0] * 5, "weights": [1.0] * 5},
    ),
    "placeholders on the prompt": (
        "importance_sampling",
        LP,
        {"logprobs": [0.0, -1000.0, -0.02, -8.0, -1.0], "advantages": [0.0, 3.0, 0.5, 0.3, 1.0], "weights": [0, 0, 1, 1, 1]},
    ),
    "one sampled token": ("importance_sampling", [-3.0], {"logprobs": [-2.0], "advantages": [1.5], "weights": [1.0]}),
}


@pytest.mark.parametrize(("loss_fn", "lp", "columns"), CASES.values(), ids=CASES.keys())
def test_a_loss_equals_plain_torch_in_value_and_gradient(loss_fn: str, lp: list[float], columns: Inputs):
    inputs = {key: torch.tensor(column, dtype=torch.float32) for key, column in columns.items()}
    ours = torch.tensor(lp, requires_grad=True)
    output = LOSS_FNS[loss_fn](ours, inputs, resolve_config(LOSSES[loss_fn], None))
    output.per_token_T.sum().backward()

    theirs = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    expected = REFERENCES[loss_fn](theirs, **columns)
    expected.sum().backward()

    torch.testing.assert_close(output.per_token_T.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-7)
    assert output.metrics["loss:sum"].value == pytest.approx(expected.sum().item(), rel=1e-5, abs=1e-6)
    assert output.metrics["weight:sum"].value == pytest.approx(sum(columns["weights"]), abs=1e-6)


@pytest.mark.parametrize("placeholder", [0.0, -1000.0, 1000.0])
def test_placeholder_logprobs_on_the_prompt_move_nothing(placeholder: float):
    lp = torch.tensor([-3.0, -4.0, -0.5], requires_grad=True)
    inputs = {
        "logprobs": torch.tensor([placeholder, placeholder, -0.75]),
        "advantages": torch.tensor([2.0, 0.0, 2.0]),
        "weights": torch.tensor([0.0, 0.0, 1.0]),
    }
    output = LOSS_FNS["importance_sampling"](lp, inputs, {})
    output.per_token_T.sum().backward()
    slope = -2.0 * np.exp(0.25)
    assert output.per_token_T.tolist() == pytest.approx([0.0, 0.0, slope], rel=1e-6)
    assert lp.grad.tolist() == pytest.approx([0.0, 0.0, slope], rel=1e-6)
    assert lp.grad[:2].tolist() == [0.0, 0.0]
    assert output.metrics["ratio:mean"].value == pytest.approx(np.exp(0.25), rel=1e-6)


@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_a_gate_that_is_0_leaves_the_token_without_gradient(loss_fn: str):
    spec = LOSSES[loss_fn]
    assert set(spec.gates) <= set(spec.all_inputs)
    generator = torch.Generator().manual_seed(1)
    for gate in spec.gates:
        inputs = {key: torch.randn(6, generator=generator) for key in spec.all_inputs}
        inputs[gate][[1, 4]] = 0.0
        lp = torch.randn(6, generator=generator, requires_grad=True)
        LOSS_FNS[loss_fn](lp, inputs, resolve_config(spec, None)).per_token_T.sum().backward()
        assert [t for t in range(6) if lp.grad[t] == 0] == [1, 4]


def test_the_divergence_metrics_equal_numpy_over_the_sampled_tokens():
    rng = np.random.default_rng(0)
    lp, q = rng.uniform(-5, 0, 40).astype(np.float32), rng.uniform(-5, -0.1, 40).astype(np.float32)
    advantages, weights = rng.normal(size=40).astype(np.float32), np.ones(40, dtype=np.float32)
    weights[:7], q[:7] = 0.0, -1000.0  # a prompt that is masked
    q[7:12], advantages[7:12] = 0.0, 0.0  # a prompt given without weights
    inputs = {"logprobs": q, "advantages": advantages, "weights": weights}
    tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
    metrics = LOSS_FNS["importance_sampling"](torch.from_numpy(lp), tensors, {}).metrics

    diff = (lp[12:] - q[12:]).astype(np.float64)
    ratio = np.exp(diff)
    expected = {
        "kl_sample_train_v1:mean": np.mean(-diff),
        "kl_sample_train_v2:mean": 0.5 * np.mean(diff**2),
        "ratio:mean": np.mean(ratio),
        "ess:mean": np.sum(ratio) ** 2 / (28 * np.sum(ratio**2)),
    }
    assert metrics.keys() == expected.keys() | {"loss:sum", "weight:sum"}
    for name, value in expected.items():
        assert metrics[name].value == pytest.approx(value, rel=1e-6)
        assert metrics[name].weight == 28


def test_the_learner_that_sampled_the_tokens_itself_diverges_nowhere():
    lp = torch.tensor([-0.5, -2.0, -7.0])
    inputs = {"logprobs": lp.clone(), "advantages": torch.tensor([1.0, -1.0, 2.0]), "weights": torch.ones(3)}
    metrics = LOSS_FNS["importance_sampling"](lp, inputs, {}).metrics
    means = {name: metric.value for name, metric in metrics.items() if name.endswith(":mean")}
    assert means == {"kl_sample_train_v1:mean": 0, "kl_sample_train_v2:mean": 0, "ratio:mean": 1, "ess:mean": 1}


def test_no_sampled_token_means_no_divergence_metrics():
    inputs = {"logprobs": torch.zeros(3), "advantages": torch.zeros(3), "weights": torch.ones(3)}
    metrics = LOSS_FNS["importance_sampling"](torch.tensor([-1.0, -2.0, -3.0]), inputs, {}).metrics
    assert metrics.keys() == {"loss:sum", "weight:sum"}
    assert metrics["loss:sum"].value == 0.0


@pytest.mark.parametrize("num_tokens", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 77])
def test_target_logprobs_equal_log_softmax_in_value_and_gradient(num_tokens: int):
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 24, generator=generator)
    weight = torch.randn(131, 24, generator=generator)
    targets = torch.randint(131, (num_tokens,), generator=generator)
    coefficients = torch.randn(num_tokens, generator=generator)

    ours = hidden.clone().requires_grad_()
    logprobs = target_logprobs(ours, weight, targets, torch.ones(num_tokens, dtype=torch.bool))
    (logprobs * coefficients).sum().backward()
    theirs = hidden.clone().requires_grad_()
    expected = (theirs @ weight.T).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    (expected * coefficients).sum().backward()

    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=2e-5)


def test_only_trained_tokens_get_a_gradient_and_all_get_their_logprob():
    num_tokens = 2 * CHUNK_TOKENS + 40
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 16, generator=generator)
    weight = torch.randn(97, 16, generator=generator)
    targets = torch.randint(97, (num_tokens,), generator=generator)
    trained = torch.rand(num_tokens, generator=generator) < 0.3
    trained[CHUNK_TOKENS : 2 * CHUNK_TOKENS] = False  # a chunk that nobody trains

    ours = hidden.clone().requires_grad_()
    logprobs = target_logprobs(ours, weight, targets, trained)
    logprobs.sum().backward()
    theirs = hidden.clone().requires_grad_()
    expected = (theirs @ weight.T).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    expected[trained].sum().backward()

    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=2e-5)
    assert ours.grad[~trained].abs().max() == 0
    assert (ours.grad[trained].abs().amax(-1) > 0).all()


def test_target_logprobs_without_gradient_are_the_same():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 8, generator=generator), torch.randn(11, 8, generator=generator)
    targets = torch.tensor([0, 10, 3, 3, 7])
    logprobs = target_logprobs(hidden, weight, targets, torch.zeros(5, dtype=torch.bool))
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs, (hidden @ weight.T).log_softmax(-1)[torch.arange(5), targets])


def test_every_loss_has_a_spec_a_function_and_a_reference_here():
    assert list(LOSSES) == list(LOSS_FNS)
    assert set(LOSSES) == set(REFERENCES) == {loss_fn for loss_fn, _, _ in CASES.values()}
    assert all(spec.name == name for name, spec in LOSSES.items())


def test_an_unknown_loss_is_refused_with_the_known_ones():
    with pytest.raises(LossError) as refusal:
        get_loss("importance_samplin")
    message = str(refusal.value)
    assert "'importance_samplin'" in message
    assert "did you mean 'importance_sampling'?" in message
    assert [name for name in LOSSES if name not in message] == []
    assert get_loss("cross_entropy") is LOSSES["cross_entropy"]


CLIPPED = LossSpec("clipped", inputs=("logprobs",), config={"low": 0.8, "high": 1.2})


def test_an_unknown_config_key_is_refused_with_the_known_ones():
    with pytest.raises(LossError, match=r"'clipped' has no config key 'hihg'.* high, low"):
        resolve_config(CLIPPED, {"low": 0.5, "hihg": 1.5})
    with pytest.raises(LossError, match=r"'cross_entropy' has no config key 'beta'.* none"):
        resolve_config(LOSSES["cross_entropy"], {"beta": 0.1})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "0.5", None, True, [0.5]])
def test_a_config_value_that_is_no_finite_number_is_refused_by_key(value: object):
    with pytest.raises(LossError, match="'clipped': low must be a finite number"):
        resolve_config(CLIPPED, {"low": value})


def test_config_values_stand_over_the_defaults():
    assert resolve_config(CLIPPED, None) == {"low": 0.8, "high": 1.2}
    assert resolve_config(CLIPPED, {"high": 2}) == {"low": 0.8, "high": 2}
    assert CLIPPED.config == {"low": 0.8, "high": 1.2}
