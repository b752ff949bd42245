"""Every argument of the training API is honoured or refused with a sentence: a test for each, and one that counts them."""

from __future__ import annotations

import inspect
import time

import pytest
import ray
from arguments import DATA, config_of, logprobs, names_of, stepped
from datums import group

import raysessions as rs

MEMORY = 50 * 2**20


def test_every_argument_of_every_verb_has_a_test_here():
    """A new argument without one fails here."""
    assert names_of(globals(), "training") == rs.TrainingConfig.model_fields.keys()
    assert names_of(globals(), "adam") == rs.AdamParams.model_fields.keys()
    verbs = (rs.TrainingClient.forward, rs.TrainingClient.forward_backward)
    assert all(names_of(globals(), "loss") == inspect.signature(verb).parameters.keys() - {"self"} for verb in verbs)


def test_training_dtype(create):
    assert create(training=config_of(dtype="float32")).get_info().dtype == "float32"
    with pytest.raises(rs.ConfigError, match="dtype"):
        config_of(dtype="int4")


def test_training_placement_timeout_s(create):
    started = time.perf_counter()
    with pytest.raises(rs.PlacementError, match="within 1 s"):
        create(training=config_of(actor_options={"num_cpus": 512}, placement_timeout_s=1))
    assert time.perf_counter() - started < 10


@pytest.fixture(scope="module")
def unusual(service, resident, tiny_model):
    """A session whose settings each show in a test of its own, and how much of Ray's memory its ranks took."""
    config = config_of(
        num_threads=1,
        max_tokens_per_micro_batch=50,
        gradient_checkpointing=True,
        snapshot_every=2,
        actor_options={"num_cpus": 0, "memory": MEMORY},
    )
    before = ray.available_resources()["memory"]
    with service.create_lora_training_client(str(tiny_model), rank=8, seed=0, training=config) as training:
        yield training, before - ray.available_resources()["memory"]


@pytest.fixture
def told(unusual) -> dict[str, float]:
    """Metrics of a loss that looks around where it is computed."""

    def look(logprobs_T, inputs, config):
        import torch

        return -logprobs_T, {"threads:max": torch.get_num_threads(), "micro_batches:sum": 1}

    rs.register_loss(rs.LossSpec("look_around", inputs=("weights",)), look)
    try:
        return unusual[0].forward(DATA, "look_around").result().metrics
    finally:
        rs.losses.LOSSES.pop("look_around")
        rs.losses.FUNCTIONS.pop("look_around")


def test_training_num_threads(told):
    assert told["threads:max"] == 1


def test_training_max_tokens_per_micro_batch(told):
    """Lengths of 6, 9 and 40 tokens are two micro-batches of 50."""
    assert told["micro_batches:sum"] == 2


def test_training_actor_options(unusual):
    assert unusual[1] == pytest.approx(MEMORY)
    with pytest.raises(rs.ConfigError, match="unknown actor_options"):
        config_of(actor_options={"num_cpu": 1})


def test_training_gradient_checkpointing(unusual, create):
    """What it saves is shown in test_training_arithmetic.py."""
    assert stepped(unusual[0]) == pytest.approx(stepped(create(rank=8, seed=0)), abs=1e-4)


def test_training_snapshot_every(unusual):
    """What it is for is shown in test_recovery.py."""
    assert len(logprobs(unusual[0])) == sum(datum.model_input.length for datum in DATA)
    with pytest.raises(rs.ConfigError, match="snapshot_every"):
        rs.TrainingConfig(snapshot_every=0)


def test_training_num_workers__with_fewer_datums_than_ranks(create):
    training = create(training=config_of(num_workers=2))
    assert training.get_info().num_workers == 2
    assert training.forward_backward(DATA[:1]).result().loss_fn_outputs


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_zero_stage(create, stage):
    training = create(seed=0, training=config_of(zero_stage=stage))
    assert training.get_info().zero_stage == stage
    assert stepped(training) == pytest.approx(stepped(create(seed=0)), abs=1e-4)


def test_training_offload_param(create):
    with pytest.raises(rs.ConfigError, match="needs zero_stage=3"):
        config_of(offload_param=True)
    with pytest.raises(rs.ConfigError, match="on CPU already"):
        create(training=config_of(offload_param=True, zero_stage=3))


def test_training_max_recoveries(create):
    """What it is for is shown in test_recovery.py."""
    ours = create(seed=0, training=config_of(max_recoveries=0))
    assert stepped(ours) == pytest.approx(stepped(create(seed=0)), rel=1e-4)
    with pytest.raises(rs.ConfigError, match="max_recoveries"):
        rs.TrainingConfig(max_recoveries=-1)


def test_training_operation_timeout_s():
    """What it is for is shown in test_recovery.py."""
    with pytest.raises(rs.ConfigError, match="operation_timeout_s"):
        rs.TrainingConfig(operation_timeout_s=0)


def _arrives(create, **adam: float) -> bool:
    """Whether the setting changes the steps. That it has torch's meaning is shown in test_training_arithmetic.py."""
    base = {"eps": 1e-2}  # with the default the step hardly depends on the gradient's size
    return stepped(create(seed=0), **{**base, **adam}) != stepped(create(seed=0), **base)


def test_adam_learning_rate(create):
    assert _arrives(create, learning_rate=2e-2)


def test_adam_beta1(create):
    assert _arrives(create, beta1=0.1)


def test_adam_beta2(create):
    assert _arrives(create, beta2=0.1)


def test_adam_eps(create):
    assert _arrives(create, eps=1.0)


def test_adam_weight_decay(create):
    assert _arrives(create, weight_decay=5.0)


def test_adam_grad_clip_norm(create):
    assert _arrives(create, grad_clip_norm=1e-2)


def test_loss_data(create):
    training = create()
    assert len(training.forward(DATA).result().loss_fn_outputs) == len(DATA)
    with pytest.raises(rs.DatumError, match="data is empty"):
        training.forward_backward([])


@pytest.mark.parametrize("loss_fn", sorted(rs.LOSSES))
@pytest.mark.filterwarnings("ignore::raysessions.diagnostics.NumericsWarning")
def test_loss_loss_fn(create, loss_fn):
    data = DATA if loss_fn == "cross_entropy" else group(10, (5, 7, 2))
    output = create().forward_backward(data, loss_fn).result()
    assert sum(sum(o["elementwise_loss"].tolist()) for o in output.loss_fn_outputs) == pytest.approx(output.loss, rel=1e-4)
    with pytest.raises(rs.LossError, match="Known: "):
        create().forward_backward(data, "no_such_loss")


@pytest.mark.filterwarnings("ignore::raysessions.diagnostics.NumericsWarning")
def test_loss_loss_fn_config(create):
    data = group(10, (5, 7, 2))
    training = create()
    wide = training.forward(data, "ppo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}).result()
    narrow = training.forward(data, "ppo", {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}).result()
    assert wide.metrics["clip_fraction:mean"] == 0 < narrow.metrics["clip_fraction:mean"]
    with pytest.raises(rs.LossError, match="no config key"):
        training.forward(data, "ppo", {"clip": 0.2})
