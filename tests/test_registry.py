"""Versions on a filesystem: what is read is what was written, or an error."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from raysessions import CheckpointNotFoundError, IntegrityError
from raysessions.adapter_weights import WEIGHTS_FILE, AdapterWeights, to_peft_files
from raysessions.config import LoraConfig
from raysessions.registry import MANIFEST, Registry
from raysessions.uris import VersionUri

URI = VersionUri("session-1", 3)


@pytest.fixture
def registry(tmp_path) -> Registry:
    return Registry(str(tmp_path / "versions"))


def weights(dtype=np.float32) -> AdapterWeights:
    rng = np.random.default_rng(0)
    flat = rng.normal(size=7 * 4).astype(np.float32) if dtype is np.float32 else rng.integers(0, 2**16, 28).astype(np.uint16)
    entries = (("b.q.lora_A.weight", (2, 5)), ("b.q.lora_B.weight", (4, 2)), ("a.k.lora_A.weight", (2, 5)))
    return AdapterWeights(flat, entries, 2, 16.0, ("k", "q"), 2)


def by_name(adapter: AdapterWeights) -> dict[str, np.ndarray]:
    tensors, begin = {}, 0
    for name, shape in adapter.entries:
        tensors[name] = adapter.flat[begin : begin + int(np.prod(shape))].reshape(shape)
        begin += int(np.prod(shape))
    assert begin == len(adapter.flat)
    return tensors


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_a_version_is_read_as_it_was_written(registry, dtype):
    written = weights(dtype)
    registry.write(URI, written)
    read = registry.read(URI)
    assert (read.rank, read.alpha, read.target_modules, read.num_modules) == (2, 16.0, ("k", "q"), 2)
    assert read.dtype == written.dtype
    expected, got = by_name(written), by_name(read)
    assert got.keys() == expected.keys()
    assert all(np.array_equal(got[name], expected[name]) for name in expected)


def test_a_uri_of_a_filesystem_is_understood(tmp_path):
    Registry(f"file://{tmp_path}/there").write(URI, weights())
    assert Registry(str(tmp_path / "there")).read(URI).rank == 2


def test_a_version_that_is_not_there_half_written_or_deleted_is_not_found(registry, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="session-1/v3"):
        registry.read(URI)
    registry.write(URI, weights())
    (tmp_path / "versions/session-1/v3" / MANIFEST).unlink()  # as if its writer had been killed
    with pytest.raises(CheckpointNotFoundError):
        registry.read(URI)
    registry.write(URI, weights())
    registry.delete(URI)
    registry.delete(URI)
    with pytest.raises(CheckpointNotFoundError):
        registry.read(URI)


def test_a_changed_byte_is_noticed(registry, tmp_path):
    registry.write(URI, weights())
    file = tmp_path / "versions/session-1/v3" / WEIGHTS_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(IntegrityError, match=WEIGHTS_FILE):
        registry.read(URI)


def test_the_files_are_a_peft_folder_that_peft_loads(registry, engine_factory, tiny_model, tmp_path):
    engine = engine_factory()
    engine.add_session("s", LoraConfig(rank=8, alpha=16, seed=3))
    engine._adapters["s"].weights.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(5))
    adapter = engine.export_adapter("s")
    for name, content in to_peft_files(adapter).items():
        (tmp_path / name).write_bytes(content)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), tmp_path)
    state = {name.replace(".default", ""): value for name, value in model.state_dict().items() if "lora_" in name}
    expected = by_name(adapter)
    assert state.keys() == expected.keys()
    assert all(np.array_equal(state[name].numpy(), expected[name]) for name in expected)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 16
