"""Every argument of the training API is honoured or refused with a sentence: a test for each, and one that counts them."""

from __future__ import annotations

import inspect
import sys
import time

import pytest
import ray
from datums import group, supervised

import raysessions as rs

DATA = supervised((6, 9, 40))
ANYWHERE = {"num_cpus": 0}


@pytest.fixture
def create(service, resident, tiny_model):
    """Creates sessions on the resident host, or another if the arguments say so; stops them afterwards."""
    created = []

    def create(base_model: str = str(tiny_model), **arguments):
        created.append(service.create_lora_training_client(base_model, **arguments))
        return created[-1]

    yield create
    for training in created:
        training.stop()


def config_of(**settings) -> rs.TrainingConfig:
    return rs.TrainingConfig(**{"num_threads": 1, "actor_options": ANYWHERE, **settings})


def logprobs(training: rs.TrainingClient) -> list[float]:
    return [lp for output in training.forward(DATA).result().loss_fn_outputs for lp in output["logprobs"].tolist()]


def stepped(training: rs.TrainingClient, **adam: float) -> list[float]:
    """Logprobs after two optimizer steps."""
    for _ in range(2):
        training.forward_backward(DATA)
        training.optim_step(rs.AdamParams(**{"learning_rate": 1e-2, **adam}))
    return logprobs(training)


def names_of(prefix: str) -> set[str]:
    """The arguments that a test here is about: `test_PREFIX_ARGUMENT` or `test_PREFIX_ARGUMENT__what_it_shows`."""
    tests = [name for name in vars(sys.modules[__name__]) if name.startswith(f"test_{prefix}_")]
    return {name.removeprefix(f"test_{prefix}_").partition("__")[0] for name in tests}


def test_every_argument_of_every_verb_has_a_test_here():
    """A new argument without one fails here."""
    create = inspect.signature(rs.ServiceClient.create_lora_training_client).parameters
    assert names_of("create") == create.keys() - {"self", "settings"} | rs.Settings.model_fields.keys()
    assert names_of("training") == rs.TrainingConfig.model_fields.keys()
    assert names_of("adam") == rs.AdamParams.model_fields.keys()
    verbs = (rs.TrainingClient.forward, rs.TrainingClient.forward_backward)
    assert all(names_of("loss") == inspect.signature(verb).parameters.keys() - {"self"} for verb in verbs)


def test_create_base_model(create, tiny_model):
    assert create(str(tiny_model)).get_info().base_model == str(tiny_model)
    with pytest.raises(rs.ModelNotFoundError):
        create("no-such-model")


def test_create_rank(create):
    one, four = create(rank=1).get_info(), create(rank=4).get_info()
    assert (one.rank, four.rank) == (1, 4)
    assert four.num_trainable_parameters == 4 * one.num_trainable_parameters


def test_create_alpha(create):
    """B starts at 0, so the first gradient is proportional to the scale alpha / rank."""
    norms = []
    for alpha in (16, 48):
        training = create(seed=0, alpha=alpha)
        training.forward_backward(DATA)
        norms.append(training.optim_step().result().metrics["grad_norm:max"])
    assert norms[1] == pytest.approx(3 * norms[0], rel=1e-5)


def test_create_seed(create):
    same, again, other = (stepped(create(seed=seed)) for seed in (1, 1, 2))
    assert same == again
    assert same != other
    assert create().get_info().seed != create().get_info().seed


def test_create_train_mlp(create):
    assert create(train_mlp=False).get_info().target_modules == ("k_proj", "o_proj", "q_proj", "v_proj")


def test_create_train_attn(create):
    assert create(train_attn=False).get_info().target_modules == ("down_proj", "gate_proj", "up_proj")


def test_create_train_unembed(create):
    with pytest.raises(rs.ConfigError, match="output layer"):
        create(train_unembed=True)


def test_create_target_modules(create):
    assert create(target_modules=["v_proj", "up_proj"]).get_info().target_modules == ("up_proj", "v_proj")


def test_create_name(create):
    assert create(name="mine").get_info().session_id == "mine"
    with pytest.raises(rs.ConfigError, match="choose another name"):
        create(name="mine")


def test_create_share(create):
    shared, alone = create(), create(share=False, training=config_of())
    assert "resident" in shared.get_info().sharing
    assert alone.get_info().sharing == ()


def test_create_training(create):
    assert create(training=config_of(dtype="bfloat16")).get_info().dtype == "bfloat16"


def test_create_sampling(create):
    with pytest.raises(rs.ConfigError, match="max_lora_rank=8"):
        create(rank=64, sampling=rs.SamplingConfig(max_lora_rank=8))


def test_create_tenant(create, service):
    path = create(tenant="somebody").save_state("s").result().path
    assert service.get_checkpoint(path).tenant == "somebody"
    with pytest.raises(rs.ConfigError, match="small letters"):
        create(tenant="Some Body")


def test_create_model_package_group(create):
    assert create(model_package_group="our-models").save_state("s").result().path.startswith("raysessions://our-models/v")
    with pytest.raises(rs.ConfigError, match="small letters"):
        create(model_package_group="../elsewhere")


def test_create_output_uri(create, tmp_path):
    create(output_uri=str(tmp_path)).save_state("s").result()
    assert (tmp_path / "versions/default/v1/manifest.json").exists()


def test_create_storage_options(create, tmp_path):
    create(output_uri=f"file://{tmp_path}", storage_options={"auto_mkdir": True}).save_state("s").result()
    assert (tmp_path / "versions/default/v1/manifest.json").exists()


def test_create_encryption_key(create, service, tmp_path):
    create(output_uri=str(tmp_path), encryption_key=b"k" * 32).save_state("s").result()
    assert b"lora" not in (tmp_path / "versions/default/v1/adapter_model.safetensors").read_bytes()
    with pytest.raises(rs.ConfigError, match="32 bytes"):
        create(encryption_key=b"short")


def test_create_keep_refreshes(create, service):
    """What it keeps is shown in test_checkpoints.py."""
    with pytest.raises(rs.ConfigError, match="keep_refreshes"):
        create(keep_refreshes=0)


def test_create_user_metadata(create, service):
    path = create(user_metadata={"a": "b"}).save_state("s").result().path
    assert service.get_checkpoint(path).user_metadata == {"a": "b"}
    with pytest.raises(rs.ConfigError, match="user_metadata"):
        create(user_metadata={"a": 1})


def test_create_session_name_prefix(create):
    assert create(session_name_prefix="ours").get_info().session_id.startswith("ours-")


def test_create_detached(create):
    """What it does is shown in test_lifetimes.py."""
    with pytest.raises(rs.ConfigError, match="detached=True"):
        create(detached=True)


def test_create_idle_timeout_s(create):
    """That it expires is shown in test_lifetimes.py, as for the next two."""
    with pytest.raises(rs.ConfigError, match="idle_timeout_s"):
        create(idle_timeout_s=0)


def test_create_max_lifetime_s(create):
    with pytest.raises(rs.ConfigError, match="max_lifetime_s"):
        create(max_lifetime_s=-1)


def test_create_lease_s(create):
    with pytest.raises(rs.ConfigError, match="lease_s"):
        create(lease_s=0)


def test_create_network(create, monkeypatch):
    with pytest.raises(rs.ConfigError, match="RAY_USE_TLS"):
        create(network=rs.NetworkConfig(require_tls=True))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(rs.ConfigError, match="RAY_AUTH_MODE=token"):
        create(network=rs.NetworkConfig(require_token_auth=True))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    elsewhere = rs.NetworkConfig(require_token_auth=True, node_labels={"zone": "nowhere"})
    with pytest.raises(rs.PlacementError, match="No room"):
        create(network=elsewhere, training=config_of(placement_timeout_s=2))


def test_create_timeout_s(create):
    with pytest.raises(rs.RequestTimeoutError):
        create(training=config_of(max_tokens_per_micro_batch=77), timeout_s=0.01)


def test_training_dtype(create):
    assert create(training=config_of(dtype="float32")).get_info().dtype == "float32"
    with pytest.raises(rs.ConfigError, match="dtype"):
        config_of(dtype="int4")


def test_training_num_threads(create, tiny_model):
    training = create(training=config_of(num_threads=1, max_tokens_per_micro_batch=501))

    def count(logprobs_T, inputs, config):
        import torch

        return -logprobs_T, {"threads:max": torch.get_num_threads()}

    rs.register_loss(rs.LossSpec("count_threads", inputs=("weights",)), count)
    try:
        assert training.forward(DATA, "count_threads").result().metrics["threads:max"] == 1
    finally:
        rs.losses.LOSSES.pop("count_threads")
        rs.losses.FUNCTIONS.pop("count_threads")


def test_training_placement_timeout_s(create):
    started = time.perf_counter()
    with pytest.raises(rs.PlacementError, match="within 1 s"):
        create(training=config_of(actor_options={"num_cpus": 512}, placement_timeout_s=1))
    assert time.perf_counter() - started < 10


def test_training_actor_options(create):
    before = ray.available_resources()["memory"]
    create(training=config_of(actor_options={"num_cpus": 0, "memory": 50 * 2**20}))
    assert ray.available_resources()["memory"] == pytest.approx(before - 50 * 2**20)
    with pytest.raises(rs.ConfigError, match="unknown actor_options"):
        config_of(actor_options={"num_cpu": 1})


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


def test_training_gradient_checkpointing(create):
    training = create(seed=0, training=config_of(gradient_checkpointing=True))
    assert stepped(training) == pytest.approx(stepped(create(seed=0)), abs=1e-4)


def test_training_snapshot_every(create):
    """What it is for is shown in test_recovery.py."""
    ours = create(seed=0, training=config_of(snapshot_every=2))
    assert stepped(ours) == pytest.approx(stepped(create(seed=0)), rel=1e-4)
    with pytest.raises(rs.ConfigError, match="snapshot_every"):
        rs.TrainingConfig(snapshot_every=0)


def test_training_max_recoveries(create):
    """What it is for is shown in test_recovery.py."""
    ours = create(seed=0, training=config_of(max_recoveries=0))
    assert stepped(ours) == pytest.approx(stepped(create(seed=0)), rel=1e-4)
    with pytest.raises(rs.ConfigError, match="max_recoveries"):
        rs.TrainingConfig(max_recoveries=-1)


def test_training_max_tokens_per_micro_batch(create):
    """The number of micro-batches shows in a metric that every one of them adds 1 to."""
    rs.register_loss(rs.LossSpec("count", inputs=("weights",)), lambda lp, inputs, config: (-lp, {"micro_batches:sum": 1}))
    try:
        for budget, expected in ((50, 2), (500, 1)):
            training = create(training=config_of(max_tokens_per_micro_batch=budget))
            assert training.forward(DATA, "count").result().metrics["micro_batches:sum"] == expected
    finally:
        rs.losses.LOSSES.pop("count")
        rs.losses.FUNCTIONS.pop("count")


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
