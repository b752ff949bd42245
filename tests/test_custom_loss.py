"""forward_backward_custom and register_loss: a loss of the user's own equals plain autograd. Conformance A8."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
import warnings

import numpy as np
import pytest
import torch
from datums import group, supervised

import raysessions as rs
from raysessions import LossError, LossSpec, losses
from raysessions.diagnostics import NumericsWarning

# A step in which eps is far above the gradient moves the weights along it: two sessions that were given the same gradient
# have the same logprobs afterwards, and 1 % more of it would show.
ALONG_THE_GRADIENT = rs.AdamParams(learning_rate=3.0, eps=1e3)
DATA = supervised((6, 9, 40, 3))


def _after(service, tiny_model, take_gradient) -> tuple[np.ndarray, float]:
    """All logprobs of DATA after one step with the gradient that `take_gradient(training)` accumulates, and its norm."""
    with service.create_lora_training_client(str(tiny_model), rank=8, seed=0) as training:
        training.forward_backward(supervised((30,), seed=7)).result()
        training.optim_step(rs.AdamParams(learning_rate=0.02)).result()  # B is not zero any more
        take_gradient(training)
        norm = training.optim_step(ALONG_THE_GRADIENT).result().metrics["grad_norm:max"]
        outputs = training.forward(DATA).result().loss_fn_outputs
    return np.concatenate([output["logprobs"].to_numpy() for output in outputs]), norm


def dpo(data, logprobs):
    """Couples each datum with the next."""
    sums = torch.stack([lp.sum() for lp in logprobs])
    margins = 0.1 * (sums[::2] - sums[1::2])
    return -torch.nn.functional.logsigmoid(margins).sum(), {"margin:mean": margins.mean().item()}


def test_a_loss_that_couples_datums_equals_plain_autograd(service, resident, tiny_model):
    outputs = []

    def custom(training):
        outputs.append(training.forward_backward_custom(DATA, dpo).result())

    def by_hand(training):
        """d loss / d logprob worked out on paper: −σ(−margin)·0.1 for the first of a pair, + for the second."""
        logprobs = [o["logprobs"].to_numpy() for o in training.forward(DATA).result().loss_fn_outputs]
        sums = [float(lp.sum()) for lp in logprobs]
        data = []
        for i, datum in enumerate(DATA):
            pair = i - i % 2
            slope = 0.1 / (1 + np.exp(0.1 * (sums[pair] - sums[pair + 1])))
            weights = np.full(datum.model_input.length, slope if i == pair else -slope, dtype=np.float32)
            data.append(rs.Datum(datum.model_input, {**datum.loss_fn_inputs, "weights": weights}))
        training.forward_backward(data).result()

    ours, our_norm = _after(service, tiny_model, custom)
    theirs, their_norm = _after(service, tiny_model, by_hand)
    assert our_norm == pytest.approx(their_norm, rel=1e-4)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    output = outputs[0]
    assert output.metrics["margin:mean"] != 0
    sums = [output_["logprobs"].to_numpy().sum() for output_ in output.loss_fn_outputs]
    margins = 0.1 * (np.array(sums[::2]) - np.array(sums[1::2]))
    assert output.loss == pytest.approx(np.log1p(np.exp(-margins)).sum(), rel=1e-4)
    assert output.metrics["margin:mean"] == pytest.approx(margins.mean(), rel=1e-4)
    assert [output_.keys() for output_ in output.loss_fn_outputs] == [{"logprobs"}] * 4


def test_a_loss_of_one_position_trains_that_position_only(service, resident, tiny_model):
    def custom(training):
        training.forward_backward_custom(DATA, lambda data, logprobs: (-2.0 * logprobs[2][5], {})).result()

    def plain(training):
        weights = np.zeros(40, dtype=np.float32)
        weights[5] = 2.0
        training.forward_backward([rs.Datum(DATA[2].model_input, {**DATA[2].loss_fn_inputs, "weights": weights})]).result()

    ours, our_norm = _after(service, tiny_model, custom)
    theirs, their_norm = _after(service, tiny_model, plain)
    assert our_norm == pytest.approx(their_norm, rel=1e-4)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_custom_call_returns_at_once_and_what_follows_waits_for_both_passes(training):
    def slow(data, logprobs):
        time.sleep(1.0)
        return -sum(lp.sum() for lp in logprobs), {}

    training.forward(DATA).result()
    started = time.perf_counter()
    first = training.forward_backward_custom(DATA, slow)
    step = training.optim_step(rs.AdamParams())
    assert time.perf_counter() - started < 0.1
    assert not first.done()
    assert step.result().metrics["step:max"] == 1
    assert first.done()
    assert first.result().loss > 0


def test_the_data_reach_the_custom_loss_as_given(training):
    seen = []

    def look(data, logprobs):
        seen.append((data, [tuple(lp.shape) for lp in logprobs]))
        return -sum(lp.sum() for lp in logprobs), {"plain name": 3}

    data = [rs.Datum(datum.model_input, {**datum.loss_fn_inputs, "mine": "anything"}) for datum in DATA]
    output = training.forward_backward_custom(data, look).result()
    assert seen == [(data, [(6,), (9,), (40,), (3,)])]
    assert output.metrics["plain name"] == 3.0


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (lambda data, logprobs: 1 / 0, ZeroDivisionError, "division"),
        (lambda data, logprobs: logprobs[0].sum(), LossError, r"must return \(loss, metrics\)"),
        (lambda data, logprobs: (3.0, {}), LossError, "scalar tensor made from the logprobs"),
        (lambda data, logprobs: (logprobs[0], {}), LossError, "scalar tensor made from the logprobs"),
        (lambda data, logprobs: (torch.tensor(1.0), {}), LossError, "scalar tensor made from the logprobs"),
        (lambda data, logprobs: ((logprobs[0] * 0).sum().sqrt() * 0, {}), LossError, "gradient that is not finite"),
    ],
)
def test_a_custom_loss_that_fails_is_the_futures_error_and_applies_nothing(training, loss_fn, error, message):
    future = training.forward_backward_custom(DATA, loss_fn)
    with pytest.raises(error, match=message):
        future.result()
    with pytest.raises(rs.EmptyGradientError):
        training.optim_step().result()
    assert training.forward_backward(DATA).result().loss_fn_outputs


def test_bad_data_for_a_custom_loss_is_refused_at_the_door(training):
    with pytest.raises(rs.DatumError, match=r"data\[0\].*'target_tokens'"):
        training.forward_backward_custom([rs.Datum(rs.ModelInput.from_ints([5, 6]), {})], dpo)
    with pytest.raises(rs.DatumError, match="data is empty"):
        training.forward_backward_custom([], dpo)
    assert training.forward(DATA).result().loss_fn_outputs


def test_a_queued_custom_call_can_be_cancelled(training):
    def slow(data, logprobs):
        time.sleep(1.0)
        return -logprobs[0].sum(), {}

    future = training.forward_backward_custom(DATA, slow)
    assert future.cancel()
    with pytest.raises(rs.RequestCancelledError):
        future.result()
    with pytest.raises(rs.EmptyGradientError):
        training.optim_step().result()


@pytest.fixture
def registry():
    """Leaves the table of losses as it was."""
    specs, functions = dict(losses.LOSSES), dict(losses.FUNCTIONS)
    yield
    for table, before in ((losses.LOSSES, specs), (losses.FUNCTIONS, functions)):
        table.clear()
        table.update(before)


def focal(logprobs_T, inputs, config):
    probability_T = logprobs_T.exp()
    per_token_T = -inputs["weights"] * (1 - probability_T) ** config["gamma"] * logprobs_T
    return per_token_T, {"probability:mean": probability_T.mean(), "probability:max": probability_T.max()}


FOCAL = LossSpec("focal", inputs=("weights",), gates=("weights",), config={"gamma": 2.0})


def test_a_registered_loss_runs_on_the_ranks_with_its_config_and_metrics(training, registry):
    rs.register_loss(FOCAL, focal)
    plain = training.forward(DATA)
    output = training.forward_backward(DATA, "focal", {"gamma": 1.0}).result()
    expected = []
    for datum, of_datum in zip(DATA, plain.result().loss_fn_outputs, strict=True):
        lp = of_datum["logprobs"].to_numpy()
        expected.append(-datum.loss_fn_inputs["weights"] * (1 - np.exp(lp)) * lp)
    for of_datum, terms in zip(output.loss_fn_outputs, expected, strict=True):
        np.testing.assert_allclose(of_datum["elementwise_loss"].to_numpy(), terms, atol=1e-5)
    assert output.loss == pytest.approx(sum(terms.sum() for terms in expected), rel=1e-4)
    assert 0 < output.metrics["probability:mean"] < output.metrics["probability:max"] < 1
    assert training.optim_step().result().metrics["grad_norm:max"] > 0


@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (lambda lp, inputs, config: lp.sum(), LossError, "one number per token"),
        (lambda lp, inputs, config: lp.detach(), LossError, "nothing to train on"),
        (lambda lp, inputs, config: (lp, {"accuracy": 1.0}), LossError, "'accuracy' must end in"),
        (lambda lp, inputs, config: lp / inputs["wieghts"], KeyError, "wieghts"),
    ],
)
def test_a_registered_loss_that_fails_says_so_and_applies_nothing(training, registry, fn, error, message):
    rs.register_loss(FOCAL, fn)
    with pytest.raises(error, match=message):
        training.forward_backward(DATA, "focal").result()
    with pytest.raises(rs.EmptyGradientError):
        training.optim_step().result()
    assert training.forward_backward(DATA).result().loss_fn_outputs


def test_built_in_names_and_odd_specs_are_refused(registry):
    with pytest.raises(LossError, match="built-in"):
        rs.register_loss(LossSpec("ppo", inputs=()), focal)
    with pytest.raises(LossError, match="LossSpec and a function"):
        rs.register_loss("focal", focal)  # type: ignore[arg-type]
    with pytest.raises(LossError, match="none of its inputs"):
        rs.register_loss(LossSpec("focal", inputs=("weights",), gates=("advantages",)), focal)
    with pytest.raises(LossError, match="target_tokens"):
        rs.register_loss(LossSpec("focal", inputs=("target_tokens",)), focal)


def test_an_installed_distribution_offers_a_loss_by_entry_point(tmp_path):
    """Its metadata as pip writes it; the name is looked up when first used."""
    info = tmp_path / "focal_loss-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: focal-loss\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[raysessions.losses]\nfocal = focal_loss:register\n")
    (tmp_path / "focal_loss.py").write_text(
        textwrap.dedent(
            """
            from raysessions import LossSpec, register_loss

            def register():
                register_loss(LossSpec("focal", inputs=("weights",)), lambda lp, inputs, config: -lp)
            """
        )
    )
    script = (
        "from raysessions.losses import LOSSES, get_loss\n"
        "assert 'focal' not in LOSSES\n"
        "assert get_loss('focal').inputs == ('weights',)\n"
        "try:\n    get_loss('fokal')\nexcept Exception as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(tmp_path), "PATH": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "did you mean 'focal'?" in done.stdout


def test_all_zero_logprobs_and_far_samples_warn(training):
    data = group(10, (5, 7))
    for datum in data:
        datum.loss_fn_inputs["logprobs"][:] = 0.0
    with pytest.warns(NumericsWarning, match="All `logprobs` of the trained tokens are 0"):
        future = training.forward_backward(data, "ppo")
    with pytest.warns(NumericsWarning, match="above 0.1"):
        future.result()


def test_a_samplers_own_logprobs_warn_of_nothing(training):
    data = group(10, (5, 7))
    logprobs = training.forward([rs.Datum(d.model_input, {**d.loss_fn_inputs}) for d in data], "importance_sampling")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericsWarning)
        outputs = logprobs.result().loss_fn_outputs
    for datum, output in zip(data, outputs, strict=True):
        datum.loss_fn_inputs["logprobs"][:] = output["logprobs"].to_numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert training.forward_backward(data, "ppo").result().metrics["kl_sample_train_v2:mean"] < 1e-9
