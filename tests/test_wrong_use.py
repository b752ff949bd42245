"""Wrong use is met with a sentence that says what to do."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from datums import supervised

import raysessions as rs


def test_an_unknown_base_model_names_where_it_was_looked_for(service, resident):
    with pytest.raises(rs.ModelNotFoundError, match=r"not a folder.*smollm2-135m-instruct"):
        service.create_lora_training_client("no-such/model")


def test_a_folder_without_a_model_is_refused(service, resident, tmp_path):
    with pytest.raises(rs.ModelNotFoundError, match=r"no config\.json"):
        service.create_lora_training_client(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rank": 0}, "LoRA rank 0: choose 1…512"),
        ({"rank": 513}, "LoRA rank 513: choose"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"train_unembed": True}, "output layer"),
        ({"name": "Not A Name"}, "small letters"),
        ({"name": "resident"}, "choose another name"),
        ({"target_modules": ["wqkv"]}, "no linear layers of this model"),
        ({"train_mlp": False, "train_attn": False}, "has no layers"),
        ({"rank": 64, "sampling": rs.SamplingConfig(max_lora_rank=8)}, "max_lora_rank=8"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(service, resident, tiny_model, settings, sentence):
    with pytest.raises(rs.ConfigError, match=sentence):
        service.create_lora_training_client(str(tiny_model), **settings)


def test_more_resources_than_the_cluster_has_are_refused_with_what_is_free(service, resident, tiny_model):
    greedy = rs.TrainingConfig(actor_options={"num_cpus": 512}, placement_timeout_s=2)
    with pytest.raises(rs.PlacementError, match=r"Asked for each: CPU 512; free: .*CPU 0 of \d+.*Lower actor_options"):
        service.create_lora_training_client(str(tiny_model), training=greedy)


def test_a_sampler_without_memory_is_refused_with_the_numbers(service, resident, tiny_model):
    with pytest.raises(rs.PlacementError, match=r"needs about .*KV cache 9000\.0.*Lower SamplingConfig\.kv_cache_gib"):
        service.create_sampling_client(
            base_model=str(tiny_model), sampling=rs.SamplingConfig(kv_cache_gib=9000, actor_options={"num_cpus": 0})
        )


def test_a_cache_that_does_not_hold_one_sequence_is_refused_with_what_to_raise(service, resident, tiny_model):
    with pytest.raises(rs.PlacementError, match=r"holds \d+ tokens, and the context has 512.*kv_cache_gib to 0\.0"):
        service.create_sampling_client(
            base_model=str(tiny_model), sampling=rs.SamplingConfig(kv_cache_gib=1e-4, actor_options={"num_cpus": 0})
        )


def test_a_prompt_longer_than_the_context_is_refused_at_once(resident):
    sampler = resident.create_sampling_client()
    with pytest.raises(rs.ConfigError, match=r"600 tokens.*context is 512"):
        sampler.sample(rs.ModelInput.from_ints([5] * 600))
    with pytest.raises(rs.ConfigError, match="500 tokens and asks for 100"):
        sampler.sample(rs.ModelInput.from_ints([5] * 500), 1, rs.SamplingParams(max_tokens=100))
    with pytest.raises(rs.ConfigError, match="empty"):
        sampler.sample(rs.ModelInput.from_ints([]))
    with pytest.raises(rs.ConfigError, match="token id 9999"):
        sampler.sample(rs.ModelInput.from_ints([5, 9999]))
    with pytest.raises(rs.ConfigError, match="num_samples"):
        sampler.sample(rs.ModelInput.from_ints([5]), 0)


def test_bad_data_is_refused_at_once_and_nothing_is_applied(training):
    good = supervised([10])
    unequal = rs.Datum(rs.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0]})
    not_a_number = rs.Datum(rs.ModelInput.from_ints([5]), {"target_tokens": [6], "weights": [np.nan]})
    for bad, sentence in (
        ([*good, unequal], r"data\[1\].*'weights'.*shape \(2,\).*3 tokens"),
        ([not_a_number], r"data\[0\].*'weights'.*nan at position 0"),
        ([], "data is empty"),
    ):
        with pytest.raises(rs.DatumError, match=sentence):
            training.forward_backward(bad)
    with pytest.raises(rs.LossError, match="did you mean 'cross_entropy'"):
        training.forward_backward(good, "crossentropy")
    with pytest.raises(rs.LossError, match="no config key 'beta'"):
        training.forward_backward(good, "cross_entropy", {"beta": 1.0})
    with pytest.raises(rs.EmptyGradientError):
        training.optim_step().result()


def test_exactly_one_of_model_path_and_base_model(service):
    with pytest.raises(rs.ConfigError, match="exactly one"):
        service.create_sampling_client()
    with pytest.raises(rs.ConfigError, match="not a version"):
        service.create_sampling_client(model_path="/some/folder")
    with pytest.raises(rs.CheckpointNotFoundError, match="nobody/v1"):
        service.create_sampling_client(model_path="raysessions://nobody/v1")


@pytest.mark.parametrize(
    ("environment", "argument", "sentence"),
    [
        ({"RAY_ADDRESS": "127.0.0.1:1"}, "None", "No Ray cluster answers at 127.0.0.1:1"),
        ({}, "'ray://127.0.0.1:1'", "unset it for a local Ray"),
        ({}, "'nonsense'", "is not an address"),
    ],
)
def test_a_dead_or_wrong_address_is_said_within_ten_seconds(environment, argument, sentence):
    code = f"import raysessions as rs; rs.ServiceClient({argument})"
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=_environment(environment), timeout=60
    )
    assert time.monotonic() - started < 10
    assert "ClusterUnreachableError" in done.stderr
    assert sentence in done.stderr


def _environment(extra: dict[str, str]) -> dict[str, str]:
    import os

    return {**os.environ, **extra}
