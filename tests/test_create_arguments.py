"""Every argument of `create_lora_training_client` is honoured or refused with a sentence: a test for each, and one that counts
them."""

from __future__ import annotations

import inspect

import pytest
from arguments import DATA, config_of, names_of, stepped

import raysessions as rs


def test_every_argument_has_a_test_here():
    """A new argument without one fails here."""
    create = inspect.signature(rs.ServiceClient.create_lora_training_client).parameters
    assert names_of(globals(), "create") == create.keys() - {"self", "settings"} | rs.Settings.model_fields.keys()


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
