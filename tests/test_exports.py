"""Saved versions as files for others: PEFT folders out and in, merged models. Conformance E3."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from pools import train, trainer_logprobs
from runs import last_step
from transformers import AutoModelForCausalLM

import raysessions as rs

TOKENS = list(range(40, 90))


def test_an_exported_adapter_is_what_peft_loads_and_sessions_start_from(service, training, tiny_model, tmp_path):
    train(training)
    expected = trainer_logprobs(training, TOKENS)
    path = training.save_weights_for_sampler("adapter").result().path
    folder = service.export_checkpoint(path, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder)
    np.testing.assert_allclose(_logprobs(model), expected, atol=1e-4)
    with service.create_training_client_from_state(folder) as imported:
        np.testing.assert_allclose(trainer_logprobs(imported, TOKENS), expected, atol=1e-5)
    with pytest.raises(rs.ConfigError, match="exists"):
        service.export_checkpoint(path, folder)
    state = service.export_checkpoint(training.save_state("state").result().path, tmp_path / "state")
    with service.create_training_client_from_state_with_optimizer(state) as continued:
        assert last_step(continued) == last_step(training)


def test_an_adapter_that_peft_made_is_a_start(service, resident, tiny_model, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    config = PeftLoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    made = get_peft_model(base, config)
    made.save_pretrained(tmp_path / "made")
    with service.create_training_client_from_state(tmp_path / "made", base_model=str(tiny_model)) as training:
        np.testing.assert_allclose(trainer_logprobs(training, TOKENS), _logprobs(made), atol=1e-5)
        info = training.get_info()
        assert (info.rank, info.alpha, info.target_modules) == (3, 12, ("down_proj", "q_proj"))
    config = PeftLoraConfig(r=3, target_modules=["q_proj"], use_dora=True)
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config).save_pretrained(tmp_path / "dora")
    with pytest.raises(rs.CheckpointMismatchError, match="use_dora"):
        service.create_training_client_from_state(tmp_path / "dora", base_model=str(tiny_model))
    with pytest.raises(rs.CheckpointNotFoundError, match=r"adapter_config\.json"):
        service.create_training_client_from_state(tmp_path, base_model=str(tiny_model))


def test_a_merged_version_is_a_model_for_transformers_alone(service, training, tmp_path):
    train(training)
    expected = trainer_logprobs(training, TOKENS)
    saved = training.save_weights_for_sampler("final", merge_weights=True).result()
    info = service.get_checkpoint(saved.path)
    assert info.kind == "merged"
    folder = service.export_checkpoint(saved.path, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not hasattr(model, "peft_config") or not model.peft_config
    np.testing.assert_allclose(_logprobs(model), expected, atol=1e-4)
    sampler = training.create_sampling_client(saved.path)
    np.testing.assert_allclose(sampler.compute_logprobs(rs.ModelInput.from_ints(TOKENS)).result()[1:], expected, atol=1e-4)
    training.stop()
    again = service.create_sampling_client(saved.path)
    np.testing.assert_allclose(again.compute_logprobs(rs.ModelInput.from_ints(TOKENS)).result()[1:], expected, atol=1e-4)


def _logprobs(model: torch.nn.Module) -> np.ndarray:
    """Of TOKENS[1:], by a plain forward."""
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].numpy()
