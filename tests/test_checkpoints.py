"""Saved versions of live sessions: resumed, listed, exported, sampled from. Conformance E1, E2, E3, E7."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from datums import supervised
from pools import NO_CPU, PROMPT, greedy, train
from runs import last_step, steps
from transformers import AutoModelForCausalLM
from waiting import wait_for

import raysessions as rs

ELSEWHERE = rs.TrainingConfig(actor_options=NO_CPU)
"""Ranks of their own: other processes than the resident session's."""
TOKENS = list(range(40, 90))


@pytest.fixture(scope="module")
def unbroken(service, resident, tiny_model) -> list[float]:
    """The losses of a run that is not stopped."""
    with service.create_lora_training_client(str(tiny_model), rank=8, seed=0) as training:
        return steps(training, 0, 8)


def test_a_resumed_run_equals_one_that_was_not_stopped(service, training, unbroken):
    """In other processes than those that saved it."""
    assert steps(training, 0, 4) == unbroken[:4]
    saved = training.save_state("half").result()
    assert saved.path == f"raysessions://default/v{saved.version}"
    training.stop()
    with service.create_training_client_from_state_with_optimizer(saved.path, training=ELSEWHERE) as resumed:
        assert steps(resumed, 4, 4) == unbroken[4:]
        assert last_step(resumed) == 9
        info = resumed.get_info()
        assert (info.rank, info.alpha) == (8, 32)
    with service.create_training_client_from_state(saved.path) as weights_only:
        losses = steps(weights_only, 4, 4)
        assert losses[0] == unbroken[4], "the same weights"
        assert losses[1:] != unbroken[5:]
        assert last_step(weights_only) == 5


def test_a_run_goes_from_one_rank_to_two_and_back(service, training, unbroken):
    two = rs.TrainingConfig(num_workers=2, zero_stage=2, num_threads=1, actor_options=NO_CPU)
    steps(training, 0, 3)
    path = training.save_state("one").result().path
    with service.create_training_client_from_state_with_optimizer(path, training=two) as on_two:
        np.testing.assert_allclose(steps(on_two, 3, 2), unbroken[3:5], rtol=1e-5)
        path = on_two.save_state("two").result().path
    with service.create_training_client_from_state_with_optimizer(path) as on_one:
        np.testing.assert_allclose(steps(on_one, 5, 3), unbroken[5:], rtol=1e-5)
        assert last_step(on_one) == 9


def test_a_session_goes_back_to_a_state_of_its_own(training, unbroken):
    steps(training, 0, 2)
    path = training.save_state("two").result().path
    steps(training, 2, 2)
    training.forward_backward(supervised((9,)))  # a gradient that loading drops
    loaded = training.load_state_with_optimizer(path)
    losses = steps(training, 2, 6)  # queued behind it
    assert loaded.result() == rs.LoadStateResponse(path, 2)
    assert losses == unbroken[2:]
    assert training.load_state(path).result().step == 0
    with pytest.raises(rs.EmptyGradientError):
        training.optim_step().result()


def test_what_does_not_fit_is_refused_by_name_and_the_session_goes_on(service, training, tiny_model, tmp_path):
    losses = steps(training, 0, 2)
    path = training.save_state("ours").result().path
    weights = training.save_weights_for_sampler("weights").result().path
    with service.create_lora_training_client(str(tiny_model), rank=4, seed=0) as narrow:
        with pytest.raises(rs.CheckpointMismatchError, match=r"rank 8 \(the session has 4\)"):
            narrow.load_state(path).result()
        assert steps(narrow, 0, 1)
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    model.model.layers[0].self_attn.q_proj.weight.data.mul_(1.01)
    model.save_pretrained(other)
    with pytest.raises(rs.CheckpointMismatchError, match="another base model"):
        service.create_training_client_from_state(path, base_model=str(other), training=ELSEWHERE)
    with pytest.raises(rs.CheckpointMismatchError, match="weights only"):
        training.load_state_with_optimizer(weights).result()
    with pytest.raises(rs.CheckpointNotFoundError, match="nobody/v7"):
        training.load_state("raysessions://nobody/v7").result()
    with pytest.raises(rs.ConfigError, match="not a version"):
        training.load_state("nonsense")
    assert training.load_state(weights).result().step == 0, "from a sampler version too"
    assert training.load_state_with_optimizer(path).result().step == 2
    assert losses


def test_a_name_is_saved_once_unless_it_is_to_be_overwritten(service, training):
    steps(training, 0, 1)
    first = training.save_state("best", user_metadata={"score": "1"}).result()
    with pytest.raises(rs.CheckpointError, match=r"already.*overwrite=True"):
        training.save_state("best").result()
    second = training.save_state("best", overwrite=True).result()
    assert second.version > first.version
    with pytest.raises(rs.CheckpointNotFoundError):
        service.get_checkpoint(first.path)
    assert service.get_checkpoint(second.path).name == "best"
    service.delete_checkpoint(second.path)
    assert training.save_state("best").result().version > second.version
    with pytest.raises(rs.ConfigError, match="needs a name"):
        training.save_state("")
    with pytest.raises(rs.ConfigError, match="ttl_seconds is 0"):
        training.save_state("never", ttl_seconds=0)


def test_versions_are_listed_with_what_they_are(service, tiny_model, resident):
    group = "listed"
    with service.create_lora_training_client(
        str(tiny_model), rank=4, seed=0, alpha=16, model_package_group=group, user_metadata={"run": "7"}, tenant="someone"
    ) as training:
        steps(training, 0, 2)
        start = training.save_state("start", user_metadata={"why": "test"}).result().path
        train(training)
        sampler = training.save_weights_for_sampler("sampler").result().path
        session_id = training.get_info().session_id
        wait_for(lambda: len(service.list_checkpoints(group=group)) == 2)
    with service.create_training_client_from_state(start, model_package_group=group) as child:
        child.save_state("child").result()
    found = service.list_checkpoints(group=group)
    assert [(info.name, info.kind) for info in found] == [("child", "state"), ("sampler", "sampler"), ("start", "state")]
    newest, middle, oldest = found
    assert (newest.parent, middle.parent) == (start, None)
    assert (oldest.path, oldest.step, middle.path, middle.step) == (start, 2, sampler, 3)
    assert (oldest.rank, oldest.alpha, oldest.session_id, oldest.tenant) == (4, 16, session_id, "someone")
    assert oldest.user_metadata == {"run": "7", "why": "test"}
    assert middle.user_metadata == {"run": "7"}
    assert oldest.base_fingerprint == middle.base_fingerprint
    assert len(oldest.base_fingerprint) == 64
    assert time.time() - 300 < oldest.created_at < newest.created_at < time.time()
    assert oldest.num_bytes > middle.num_bytes > 0
    assert service.get_latest_checkpoint("sampler", group) == middle
    assert service.get_latest_checkpoint("merged", group) is None
    assert service.list_checkpoints(group=group, limit=1) == [newest]
    assert service.list_checkpoints("state", group) == [newest, oldest]
    service.set_checkpoint_ttl(sampler, 0.3)
    time.sleep(0.4)
    assert service.list_checkpoints(group=group) == [newest, oldest]
    with pytest.raises(rs.ConfigError, match="kind is 'weights'"):
        service.list_checkpoints("weights")


def test_of_refreshes_the_newest_are_kept_and_of_other_saves_all(service, tiny_model, resident):
    group = "refreshed"
    with service.create_lora_training_client(str(tiny_model), rank=4, model_package_group=group, keep_refreshes=3) as training:
        kept = training.save_weights_for_sampler("mine").result().path
        refreshes = [training.save_weights_and_get_sampling_client(f"step-{step}").version for step in range(6)]
    wait_for(lambda: [info.path for info in service.list_checkpoints(group=group)] == [*reversed(refreshes[3:]), kept])
    assert all(info.expires_at for info in service.list_checkpoints(group=group) if info.path != kept)


def test_a_saved_version_is_sampled_from_when_its_session_has_ended(service, training):
    train(training)
    sampler = training.save_weights_and_get_sampling_client("final")
    path, tokens = sampler.version, sampler.sample(PROMPT, 1, greedy()).result().sequences[0].tokens
    state = training.save_state("final").result().path
    training.stop()
    wait_for(lambda: service.get_latest_checkpoint("sampler").path == path)
    with pytest.raises(rs.SamplerExpiredError):
        sampler.sample(PROMPT, 1, greedy()).result()
    for saved in (path, state):
        again = service.create_sampling_client(saved)
        assert again.version == saved
        assert again.sample(PROMPT, 1, greedy()).result().sequences[0].tokens == tokens
    assert again.sample(PROMPT, 1, greedy()).result().sequences[0].tokens == tokens
    with pytest.raises(rs.CheckpointNotFoundError):
        service.create_sampling_client("raysessions://default/v99999")


def test_storage_that_fails_fails_the_save_and_not_the_session(service, resident, tiny_model, tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    with service.create_lora_training_client(str(tiny_model), rank=4, output_uri=str(in_the_way)) as training:
        steps(training, 0, 1)
        for save in (training.save_state, training.save_weights_for_sampler):
            with pytest.raises(rs.StorageError, match=re.escape(str(in_the_way))):
                save("lost").result()
        assert steps(training, 1, 1)
        in_the_way.unlink()
        assert training.save_state("found").result().version >= 1


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_fails_the_save_and_not_the_session(service, resident, tiny_model, small_disk: Path):
    with service.create_lora_training_client(str(tiny_model), rank=4, output_uri=str(small_disk)) as training:
        steps(training, 0, 1)
        with pytest.raises(rs.StorageError, match="No space left"):
            training.save_state("too large").result()
        assert service.list_checkpoints() is not None
        assert [file.name for file in small_disk.rglob("*.safetensors*")] == []
        subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
        assert steps(training, 1, 1)
        path = training.save_state("fits").result().path
        assert training.load_state_with_optimizer(path).result().step == 2


def test_an_encrypted_run_is_resumed_with_its_key_only(service, resident, tiny_model, tmp_path, unbroken):
    ours = {"output_uri": str(tmp_path), "encryption_key": bytes(range(32))}
    with service.create_lora_training_client(str(tiny_model), rank=8, seed=0, **ours) as training:
        steps(training, 0, 4)
        path = training.save_state("half").result().path
        sampler = training.save_weights_and_get_sampling_client("half")
        assert sampler.sample(PROMPT, 1, greedy()).result().sequences
    with service.create_training_client_from_state_with_optimizer(path, **ours) as resumed:
        assert steps(resumed, 4, 4) == unbroken[4:]
    for key, match in ((None, "give the encryption_key"), (bytes(32), "another encryption_key")):
        with pytest.raises(rs.IntegrityError, match=match):
            service.create_training_client_from_state(path, output_uri=str(tmp_path), encryption_key=key)
