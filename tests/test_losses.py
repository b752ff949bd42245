"""Each loss against plain torch: values and gradients. Conformance A4."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from raysessions import LOSSES, LossError, LossSpec
from raysessions.actors.maths.losses import LOSS_FNS, LossInputs, LossOutput
from raysessions.actors.maths.metrics import merge
from raysessions.losses import get_loss, resolve_config

Inputs = dict[str, list[float]]


Sequences = list[int]
"""The datum that each token belongs to."""


def cross_entropy(lp: torch.Tensor, sequence: Sequences, weights: list[float]) -> torch.Tensor:
    return torch.stack([-w * lp[t] for t, w in enumerate(weights)])


def importance_sampling(lp, sequence, logprobs, advantages, weights) -> torch.Tensor:
    terms = zip(logprobs, advantages, weights, strict=True)
    # A token that counts for nothing has no ratio: its logprob may be a placeholder.
    return torch.stack([-w * a * torch.exp(lp[t] - q) if w and a else lp[t] * 0 for t, (q, a, w) in enumerate(terms)])


def ppo(lp, sequence, logprobs, advantages, weights, low=0.8, high=1.2) -> torch.Tensor:
    losses = []
    for t, (q, a, w) in enumerate(zip(logprobs, advantages, weights, strict=True)):
        ratio = torch.exp(lp[t] - q) if w and a else lp[t] * 0 + 1
        bounded = ratio if low <= ratio.item() <= high else torch.tensor(min(max(ratio.item(), low), high)).double()
        losses.append(-w * (ratio * a if (ratio * a).item() <= (bounded * a).item() else bounded * a + 0 * lp[t]))
    return torch.stack(losses)


def cispo(lp, sequence, logprobs, advantages, weights, low=0.0, high=4.0) -> torch.Tensor:
    losses = []
    for t, (q, a, w) in enumerate(zip(logprobs, advantages, weights, strict=True)):
        coefficient = min(max(np.exp(lp[t].item() - q), low), high) if w and a else 0.0
        losses.append(-w * coefficient * a * lp[t])
    return torch.stack(losses)


def dro(lp, sequence, logprobs, advantages, weights, beta=0.05) -> torch.Tensor:
    terms = zip(logprobs, advantages, weights, strict=True)
    return torch.stack(
        [-w * (lp[t] * a - beta / 2 * (lp[t] - q) ** 2) if w else lp[t] * 0 for t, (q, a, w) in enumerate(terms)]
    )


def gspo(lp, sequence, logprobs, advantages, weights, low=0.9997, high=1.0004) -> torch.Tensor:
    losses = []
    for t, (a, w) in enumerate(zip(advantages, weights, strict=True)):
        mates = [u for u, other in enumerate(sequence) if other == sequence[t] and weights[u] != 0]
        mean = np.mean([lp[u].item() - logprobs[u] for u in mates]) if mates else 0.0
        ratio = np.exp(mean) * torch.exp(lp[t] - lp[t].item())
        bounded = ratio if low <= ratio.item() <= high else torch.tensor(min(max(ratio.item(), low), high)).double()
        losses.append(-w * (ratio * a if (ratio * a).item() <= (bounded * a).item() else bounded * a + 0 * lp[t]))
    return torch.stack(losses)


REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
POLICY = [name for name in REFERENCES if name != "cross_entropy"]

LP = [-0.7, -2.5, -0.01, -9.0, -1.3]
SEQUENCE = [0, 0, 1, 1, 1]


def _policy(logprobs, advantages, weights) -> Inputs:
    return {"logprobs": logprobs, "advantages": advantages, "weights": weights}


# Ratios inside and outside every bound, under advantages of either sign.
FAR = [-0.9, -4.5, -0.02, -7.0, -1.3]
POLICY_CASES: dict[str, tuple[list[float], Inputs]] = {
    "far and near": (LP, _policy(FAR, [1.0, 2.0, -0.5, -0.3, -0.7], [1.0] * 5)),
    "the other signs": (LP, _policy(FAR, [-1.0, -2.0, 0.5, 0.3, 0.7], [1.0] * 5)),
    "close to the sampler": (LP, _policy([lp + 1e-4 for lp in LP], [1.0, -2.0, 0.5, 0.3, -0.7], [1.0] * 5)),
    "fractional and negative weights": (LP, _policy(FAR, [1.0, -2.0, 0.5, 0.3, 0.0], [0.5, -1, 2, 0, 1])),
    "weights that sum to 0": (LP, _policy([-1.0] * 5, [1.0] * 5, [1.0, -1.0, 0.25, -0.25, 0.0])),
    "no weight at all": (LP, _policy([-1.0] * 5, [1.0] * 5, [0.0] * 5)),
    "all advantages 0": (LP, _policy([-1.0] * 5, [0.0] * 5, [1.0] * 5)),
    "placeholders on the prompt": (LP, _policy([0.0, -1000.0, -0.02, -8.0, -1.0], [0.0, 3.0, 0.5, 0.3, 1.0], [0, 0, 1, 1, 1])),
    "one sampled token": ([-3.0], _policy([-2.0], [1.5], [1.0])),
}
CASES: dict[str, tuple[str, list[float], Inputs]] = {
    "plain": ("cross_entropy", LP, {"weights": [1.0, 1.0, 1.0, 1.0, 1.0]}),
    "fractions and negative": ("cross_entropy", LP, {"weights": [0.25, -1.5, 0.0, 3.0, -0.1]}),
    "cross_entropy weights that sum to 0": ("cross_entropy", LP, {"weights": [1.0, -1.0, 0.5, -0.5, 0.0]}),
    "cross_entropy without weight": ("cross_entropy", LP, {"weights": [0.0] * 5}),
    "one token": ("cross_entropy", [-0.4], {"weights": [0.3]}),
    **{f"{name} {case}": (name, lp, inputs) for name in POLICY for case, (lp, inputs) in POLICY_CASES.items()},
}


def _run(loss_fn: str, lp: torch.Tensor, columns: Inputs, sequence: Sequences | None = None, **config: float) -> LossOutput:
    sequence = SEQUENCE[: len(lp)] if sequence is None else sequence
    tensors = {key: torch.as_tensor(column, dtype=torch.float32) for key, column in columns.items()}
    inputs = LossInputs(tensors, torch.tensor(sequence), max(sequence) + 1)
    return LOSS_FNS[loss_fn](lp, inputs, resolve_config(LOSSES[loss_fn], config))


@pytest.mark.parametrize(("loss_fn", "lp", "columns"), CASES.values(), ids=CASES.keys())
def test_a_loss_equals_plain_torch_in_value_and_gradient(loss_fn: str, lp: list[float], columns: Inputs):
    ours = torch.tensor(lp, requires_grad=True)
    output = _run(loss_fn, ours, columns)
    output.per_token_T.sum().backward()

    theirs = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    expected = REFERENCES[loss_fn](theirs, SEQUENCE[: len(lp)], **columns)
    expected.sum().backward()

    torch.testing.assert_close(output.per_token_T.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)
    assert output.metrics["loss:sum"].value == pytest.approx(expected.sum().item(), rel=1e-5, abs=1e-6)
    assert output.metrics["weight:sum"].value == pytest.approx(sum(columns["weights"]), abs=1e-6)


@pytest.mark.parametrize(
    ("loss_fn", "config", "reference"),
    [
        ("ppo", {"clip_low_threshold": 0.3, "clip_high_threshold": 1.01}, {"low": 0.3, "high": 1.01}),
        ("cispo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}, {"low": 0.5, "high": 1.1}),
        ("gspo", {"clip_low_threshold": 0.1, "clip_high_threshold": 5.0}, {"low": 0.1, "high": 5.0}),
        ("dro", {"beta": 0.7}, {"beta": 0.7}),
    ],
)
def test_a_config_changes_the_loss_as_it_says(loss_fn, config, reference):
    for lp, columns in POLICY_CASES.values():
        ours = torch.tensor(lp, requires_grad=True)
        output = _run(loss_fn, ours, columns, **config)
        output.per_token_T.sum().backward()
        theirs = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
        expected = REFERENCES[loss_fn](theirs, SEQUENCE[: len(lp)], **columns, **reference)
        expected.sum().backward()
        torch.testing.assert_close(output.per_token_T.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)


def test_clip_fraction_counts_the_tokens_whose_gradient_the_clip_took():
    # Ratios e^0.2, e^2, e^0.01, e^-2, 1 under ppo's bounds 0.8 and 1.2.
    up = _run("ppo", torch.tensor(LP), _policy(FAR, [1.0] * 5, [1.0] * 5)).metrics
    down = _run("ppo", torch.tensor(LP), _policy(FAR, [-1.0] * 5, [1.0] * 5)).metrics
    assert up["clip_fraction:mean"].value == pytest.approx(2 / 5)
    assert down["clip_fraction:mean"].value == pytest.approx(1 / 5)
    assert _run("cispo", torch.tensor(LP), _policy(FAR, [1.0] * 5, [1.0] * 5)).metrics["clip_fraction:mean"].value == 0.2
    # One ratio per sequence, e^1.1 and e^-0.66: the first is clipped where A > 0, the second where A < 0.
    gspo = _run("gspo", torch.tensor(LP), _policy(FAR, [1.0] * 5, [1.0] * 5)).metrics
    assert gspo["clip_fraction:mean"].value == pytest.approx(2 / 5)


@pytest.mark.parametrize("placeholder", [0.0, -1000.0, 1000.0])
def test_placeholder_logprobs_on_the_prompt_move_nothing(placeholder: float):
    lp = torch.tensor([-3.0, -4.0, -0.5], requires_grad=True)
    inputs = _policy([placeholder, placeholder, -0.75], [2.0, 0.0, 2.0], [0.0, 0.0, 1.0])
    output = _run("importance_sampling", lp, inputs, [0, 0, 0])
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
        _run(loss_fn, lp, inputs, [0, 0, 0, 1, 1, 1]).per_token_T.sum().backward()
        assert {1, 4} <= {t for t in range(6) if lp.grad[t] == 0}


def test_the_divergence_metrics_equal_numpy_over_the_sampled_tokens():
    rng = np.random.default_rng(0)
    lp, q = rng.uniform(-5, 0, 40).astype(np.float32), rng.uniform(-5, -0.1, 40).astype(np.float32)
    advantages, weights = rng.normal(size=40).astype(np.float32), np.ones(40, dtype=np.float32)
    weights[:7], q[:7] = 0.0, -1000.0  # a prompt that is masked
    q[7:12], advantages[7:12] = 0.0, 0.0  # a prompt given without weights
    metrics = _run("importance_sampling", torch.from_numpy(lp), _policy(q, advantages, weights), [0] * 40).metrics

    diff = (lp[12:] - q[12:]).astype(np.float64)
    ratio = np.exp(diff)
    expected = {
        "kl_sample_train_v1:mean": np.mean(-diff),
        "kl_sample_train_v2:mean": 0.5 * np.mean(diff**2),
        "ratio:mean": np.mean(ratio),
        "ratio_square:mean": np.mean(ratio**2),
        "clip_fraction:mean": 0.0,
    }
    assert metrics.keys() == expected.keys() | {"loss:sum", "weight:sum"}
    for name, value in expected.items():
        assert metrics[name].value == pytest.approx(value, rel=1e-6)
        assert metrics[name].weight == 28
    assert merge([metrics])["ess:mean"] == pytest.approx(np.sum(ratio) ** 2 / (28 * np.sum(ratio**2)), rel=1e-6)


@pytest.mark.parametrize("loss_fn", POLICY)
def test_metrics_are_the_same_however_the_datums_are_split(loss_fn: str):
    rng = np.random.default_rng(1)
    lp = torch.from_numpy(rng.uniform(-5, 0, 30).astype(np.float32))
    columns = _policy(rng.uniform(-5, -0.1, 30), rng.normal(size=30), np.ones(30))
    sequence = np.repeat([0, 1, 2], [7, 13, 10])
    whole = merge([_run(loss_fn, lp, columns, sequence.tolist()).metrics])
    parts = []
    for datum in range(3):
        own = sequence == datum
        parts.append(_run(loss_fn, lp[own], {key: value[own] for key, value in columns.items()}, [0] * own.sum()).metrics)
    assert merge(parts) == pytest.approx(whole, rel=1e-6)
    assert whole.keys() == {
        "loss:sum", "weight:sum", "kl_sample_train_v1:mean", "kl_sample_train_v2:mean", "ratio:mean", "clip_fraction:mean",
        "ess:mean",
    }  # fmt: skip


def test_the_learner_that_sampled_the_tokens_itself_diverges_nowhere():
    lp = torch.tensor([-0.5, -2.0, -7.0])
    for loss_fn in POLICY:
        metrics = merge([_run(loss_fn, lp, _policy(lp.tolist(), [1.0, -1.0, 2.0], [1.0] * 3), [0, 0, 0]).metrics])
        means = {name: value for name, value in metrics.items() if name.endswith(":mean")}
        assert means == {
            "kl_sample_train_v1:mean": 0,
            "kl_sample_train_v2:mean": 0,
            "ratio:mean": 1,
            "clip_fraction:mean": 0,
            "ess:mean": 1,
        }


def test_no_sampled_token_means_no_divergence_metrics():
    inputs = _policy([0.0] * 3, [0.0] * 3, [1.0] * 3)
    metrics = _run("importance_sampling", torch.tensor([-1.0, -2.0, -3.0]), inputs, [0, 0, 0]).metrics
    assert metrics.keys() == {"loss:sum", "weight:sum"}
    assert metrics["loss:sum"].value == 0.0


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


def test_clip_bounds_that_cross_are_refused():
    with pytest.raises(LossError, match=r"clip_low_threshold 1\.3 is above clip_high_threshold 1\.2"):
        resolve_config(LOSSES["ppo"], {"clip_low_threshold": 1.3})


def test_config_values_stand_over_the_defaults():
    assert resolve_config(CLIPPED, None) == {"low": 0.8, "high": 1.2}
    assert resolve_config(CLIPPED, {"high": 2}) == {"low": 0.8, "high": 2}
    assert CLIPPED.config == {"low": 0.8, "high": 1.2}
