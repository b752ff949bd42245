"""A version served merged into its base model."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from datums import supervised
from peft import PeftModel
from pools import NO_CPU, PROMPT, greedy
from transformers import AutoModelForCausalLM

import raysessions as rs
from raysessions.actors.engines.adapter_files import AdapterFiles
from raysessions.actors.engines.merged_weights import write_merged
from raysessions.config import LoraConfig


@pytest.fixture
def adapter(engine_factory):
    engine = engine_factory()
    engine.add_session("s", LoraConfig(rank=8, alpha=16, seed=3))
    engine._adapters["s"].weights.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(5))
    return engine.export_adapter("s")


def test_merged_weights_are_those_that_peft_would_make(adapter, tiny_model, tmp_path):
    merged = tmp_path / "merged"
    merged.mkdir()
    write_merged(tiny_model, adapter, merged)
    files = AdapterFiles()
    folder = files.write(1, adapter)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, folder).merge_and_unload().state_dict()
    files.close()
    ours = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).state_dict()
    assert ours.keys() == expected.keys()
    assert all(torch.allclose(ours[name], expected[name], atol=1e-6) for name in ours)
    pristine = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    assert any(not torch.equal(ours[name], pristine[name]) for name in ours)
    assert (merged / "tokenizer.json").exists()


def test_an_adapter_of_another_model_is_refused(adapter, tiny_model, tmp_path):
    other, merged = tmp_path / "other", tmp_path / "merged"
    shutil.copytree(tiny_model, other)
    for file in other.glob("*.safetensors"):
        file.unlink()
    merged.mkdir()
    with pytest.raises(rs.CheckpointMismatchError, match="cannot be merged"):
        write_merged(other, adapter, merged)


def test_a_merged_version_samples_as_its_adapter_does_and_outlives_its_session(service, resident, tiny_model):
    with service.create_lora_training_client(str(tiny_model), rank=8, seed=0) as training:
        for seed in range(2):
            training.forward_backward(supervised([40, 25], seed=seed))
            training.optim_step(rs.AdamParams(learning_rate=2e-2)).result()
        sampler = training.save_weights_and_get_sampling_client("trained")
        config = rs.SamplingConfig(kv_cache_gib=0.25, actor_options=NO_CPU)
        merged = service.create_sampling_client(sampler.version, merged=True, sampling=config)
        assert merged.version == sampler.version
        expected = sampler.compute_logprobs(PROMPT).result()
        np.testing.assert_allclose(merged.compute_logprobs(PROMPT).result()[1:], expected[1:], atol=1e-4)
        tokens = sampler.sample(PROMPT, 1, greedy()).result().sequences[0].tokens
        assert merged.sample(PROMPT, 1, greedy()).result().sequences[0].tokens == tokens
    assert merged.sample(PROMPT, 1, greedy()).result().sequences[0].tokens == tokens


def test_arguments_that_do_not_fit_together_are_refused(service, training, tiny_model):
    sampler = training.save_weights_and_get_sampling_client("v")
    with pytest.raises(rs.ConfigError, match="merged=True needs model_path"):
        service.create_sampling_client(base_model=str(tiny_model), merged=True)
    with pytest.raises(rs.ConfigError, match="merged=True"):
        service.create_sampling_client(sampler.version, sampling=rs.SamplingConfig())
    with pytest.raises(rs.CheckpointNotFoundError, match="nobody/v1"):
        service.create_sampling_client("raysessions://nobody/v1", merged=True)
    with pytest.raises(rs.ConfigError, match="max_restarts"):
        rs.SamplingConfig(actor_options={"max_restarts": 3})
