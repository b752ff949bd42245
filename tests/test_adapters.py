"""Adapters of several sessions on one base: what the settings of each choose. Conformance A7, without Ray."""

from __future__ import annotations

import numpy as np
import pytest

from raysessions.config import LoraConfig
from raysessions.errors import ConfigError


@pytest.fixture(scope="module")
def engine(engine_factory):
    return engine_factory(max_tokens_per_micro_batch=200)


def test_the_same_seed_gives_the_same_adapter_and_another_seed_another(engine):
    adapters = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        engine.add_session(name, LoraConfig(rank=4, alpha=8, seed=seed))
        adapters[name] = engine.export_adapter(name)
        engine.remove_session(name)
    assert np.array_equal(adapters["a"].flat, adapters["b"].flat)
    assert not np.array_equal(adapters["a"].flat, adapters["c"].flat)
    begin = 0
    for name, shape in adapters["a"].entries:
        values = adapters["a"].flat[begin : begin + int(np.prod(shape))]
        begin += int(np.prod(shape))
        assert values.any() == ("lora_A" in name)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"train_mlp": False}, ("k_proj", "o_proj", "q_proj", "v_proj")),
        ({"train_attn": False}, ("down_proj", "gate_proj", "up_proj")),
        ({"target_modules": ("up_proj", "q_proj")}, ("q_proj", "up_proj")),
    ],
)
def test_target_settings_choose_exactly_the_layers_they_name(engine, settings, expected):
    facts = engine.add_session("t", LoraConfig(rank=3, alpha=8, seed=0, **settings))
    weights = engine.export_adapter("t")
    engine.remove_session("t")
    assert facts.target_modules == expected
    assert facts.num_modules == 2 * len(expected)
    assert {name.split(".")[-3] for name, _ in weights.entries} == set(expected)
    assert all(shape[0 if "lora_A" in name else 1] == 3 for name, shape in weights.entries)


def test_unknown_or_no_target_layers_are_refused_with_the_known_ones(engine):
    with pytest.raises(ConfigError, match=r"wqkv.*q_proj"):
        engine.add_session("t", LoraConfig(rank=3, alpha=8, seed=0, target_modules=("wqkv",)))
    with pytest.raises(ConfigError, match="no layers"):
        engine.add_session("t", LoraConfig(rank=3, alpha=8, seed=0, train_mlp=False, train_attn=False))
