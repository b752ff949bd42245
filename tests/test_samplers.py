"""Samplers of a live session: real vLLM against the trainer's own forward. Conformance D1 to D7, D9, D10."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from datums import supervised
from pools import PROMPT, stored, train, trainer_logprobs
from waiting import wait_for

import raysessions as rs


@pytest.fixture
def training(training_by_replicas):
    return training_by_replicas


def _greedy(sampler: rs.SamplingClient, max_tokens: int = 20) -> rs.SampledSequence:
    params = rs.SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=[])
    return sampler.sample(PROMPT, 1, params).result().sequences[0]


def test_sampler_logprobs_equal_the_trainers_for_three_versions_in_a_row(training):
    previous = None
    for version in range(3):
        train(training, seed=10 * version)
        sampler = training.save_weights_and_get_sampling_client(f"v{version}")
        params = rs.SamplingParams(max_tokens=24, temperature=1.0, seed=version, stop=[])
        sequence = sampler.sample(PROMPT, 1, params).result().sequences[0]
        tokens = PROMPT.to_ints() + sequence.tokens
        trainer = trainer_logprobs(training, tokens)
        np.testing.assert_allclose(sequence.logprobs, trainer[PROMPT.length - 1 :], atol=1e-4)
        # The same prompt again comes from the prefix cache, and must be this version's.
        computed = sampler.compute_logprobs(rs.ModelInput.from_ints(tokens)).result()
        np.testing.assert_allclose(computed[1:], trainer, atol=1e-4)
        if previous is not None:
            assert np.abs(previous.compute_logprobs(rs.ModelInput.from_ints(tokens)).result()[5] - trainer[4]) > 1e-3
        previous = sampler


def test_a_client_stays_with_its_version_until_it_is_retired(owner_by_replicas, training):
    @ray.remote(num_cpus=0)
    class Holder:
        def __init__(self, client: rs.SamplingClient) -> None:
            self._client = client

        def greedy_tokens(self) -> list[int]:
            params = rs.SamplingParams(max_tokens=20, temperature=0.0, stop=[])
            return self._client.sample(PROMPT, 1, params).result().sequences[0].tokens

    train(training)
    first = training.save_weights_and_get_sampling_client("first")
    before = _greedy(first)
    later = []
    for version in range(2, 6):
        train(training, seed=version)
        later.append(training.save_weights_and_get_sampling_client(f"later-{version}"))
    assert _greedy(first).tokens == before.tokens
    assert _greedy(first).logprobs == pytest.approx(before.logprobs, abs=1e-6)
    assert _greedy(later[-1]).logprobs != pytest.approx(before.logprobs, abs=1e-3)
    assert owner_by_replicas.create_sampling_client(model_path=first.version).version == first.version
    path = first.version
    for _ in range(rs.SamplingConfig().max_live_versions):
        training.save_weights_for_sampler("push").result()
    assert _greedy(first).tokens == before.tokens
    holder = Holder.remote(first)
    assert ray.get(holder.greedy_tokens.remote()) == before.tokens
    del first
    gc.collect()
    for _ in range(3):
        time.sleep(0.5)  # Ray tells of a dropped reference when it likes
        training.save_weights_for_sampler("push").result()
    assert ray.get(holder.greedy_tokens.remote()) == before.tokens
    ray.kill(holder)
    wait_for(lambda: _is_retired_by_a_save(training, path))
    again = training.create_sampling_client(path)  # from the registry
    assert _greedy(again).tokens == before.tokens
    del again
    owner_by_replicas.delete_checkpoint(path)
    wait_for(lambda: _is_retired_by_a_save(training, path))
    with pytest.raises(rs.SamplerExpiredError, match="max_live_versions"):
        training.create_sampling_client(path)
    with pytest.raises(rs.CheckpointNotFoundError):
        owner_by_replicas.create_sampling_client(model_path=path)
    assert _greedy(later[-1]).tokens


def _is_retired_by_a_save(training: rs.TrainingClient, path: str) -> bool:
    training.save_weights_for_sampler("push").result()
    try:
        ray.get(training._pool.weights.remote(stored(training, path)))
    except rs.SamplerExpiredError:
        return True
    return False


def test_training_after_a_save_moves_no_sampler(training):
    train(training)
    sampler = training.save_weights_and_get_sampling_client()
    before = _greedy(sampler)
    train(training, steps=3, learning_rate=0.1)
    assert _greedy(sampler).logprobs == before.logprobs


def test_publishing_the_same_adapter_twice_changes_nothing(training):
    train(training)
    samplers = [training.save_weights_and_get_sampling_client() for _ in range(3)]
    answers = [_greedy(sampler) for sampler in samplers]
    assert len({sampler.version for sampler in samplers}) == 3
    assert answers[0].tokens == answers[1].tokens == answers[2].tokens
    assert answers[0].logprobs == pytest.approx(answers[2].logprobs, abs=1e-6)


def test_a_save_that_vllm_does_not_bind_whole_fails(training):
    """The pool is told to expect one module more than the adapter has, as if vLLM had passed one over."""
    session_id = training.get_info().session_id
    ref = training._host.submit.remote(session_id, 1, training_save_op())
    assert ray.get(ref).version >= 1
    weights = ray.put(_adapter_like(training, num_layers=2))
    uri = stored(training, "raysessions://never/v99")
    with pytest.raises(rs.SamplingPoolError, match=r"bound 14 of the adapter's 15"):
        ray.get(training._pool.publish.remote(uri, session_id, (weights,), 15))
    assert not _is_live(training, str(uri))
    unknown = ray.put(_adapter_like(training, num_layers=2, rename=("q_proj", "z_proj")))
    with pytest.raises(Exception, match="z_proj"):
        ray.get(training._pool.publish.remote(uri, session_id, (unknown,), 14))
    assert not _is_live(training, str(uri))


def training_save_op():
    from raysessions.operations import SaveForSamplerOp

    return SaveForSamplerOp("first")


def _adapter_like(training, num_layers: int, rename: tuple[str, str] = ("", "")):
    """Random adapter weights of the tiny model's shape."""
    from raysessions.adapter_weights import AdapterWeights

    sizes = {"q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32), "o_proj": (64, 64)}
    sizes |= {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
    entries = []
    for layer in range(num_layers):
        for name, (n_in, n_out) in sizes.items():
            block = "self_attn" if name[0] in "qkvo" else "mlp"
            path = f"base_model.model.model.layers.{layer}.{block}.{name.replace(*rename) if rename[0] else name}"
            entries += [(f"{path}.lora_A.weight", (8, n_in)), (f"{path}.lora_B.weight", (n_out, 8))]
    size = sum(int(np.prod(shape)) for _, shape in entries)
    flat = np.random.default_rng(0).normal(0, 0.01, size).astype(np.float32)
    return AdapterWeights(flat, tuple(entries), 8, 32.0, tuple(sorted(sizes)), 7 * num_layers)


def test_a_sampler_without_versions_is_the_base_model(service, training, tiny_model):
    base = service.create_sampling_client(base_model=str(tiny_model))
    assert base.version is None
    np.testing.assert_allclose(
        base.compute_logprobs(PROMPT).result()[1:], trainer_logprobs(training, PROMPT.to_ints()), atol=1e-4
    )


def test_base_and_versions_in_one_batch_do_not_mix(training):
    base = training.create_sampling_client()
    samplers = [base]
    for seed in range(3):
        train(training, seed=seed, learning_rate=5e-2)
        samplers.append(training.save_weights_and_get_sampling_client())
    alone = [_greedy(sampler) for sampler in samplers]
    params = rs.SamplingParams(max_tokens=20, temperature=0.0, stop=[])
    futures = [(i, sampler.sample(PROMPT, 1, params)) for _ in range(8) for i, sampler in enumerate(samplers)]
    for i, future in futures:
        assert future.result().sequences[0].logprobs == pytest.approx(alone[i].logprobs, abs=1e-4)


def test_fifty_saves_leave_memory_and_tmpfs_as_they_were(training):
    for _ in range(10):
        training.save_weights_for_sampler("warm").result()
    before, files_before = _replica_memory(), _adapter_folders()
    paths = [training.save_weights_for_sampler("again").result().path for _ in range(50)]
    assert _adapter_folders() == files_before
    assert _replica_memory() - before < 100 * 2**20
    assert _is_live(training, paths[-1])
    assert not _is_live(training, paths[-9])


def _is_live(training: rs.TrainingClient, path: str) -> bool:
    return ray.get(training._pool.session_of.remote(stored(training, path))) is not None


def _replica_memory() -> int:
    """Bytes resident in vLLM's processes of this test session."""
    import psutil

    engines = [process for process in psutil.Process().children(recursive=True) if "VLLM::" in process.name()]
    assert engines
    return sum(process.memory_info().rss for process in engines)


def _adapter_folders() -> int:
    return len(list(Path("/dev/shm").glob("raysessions-*/*")))


def test_samples_are_answered_while_an_operation_trains(training):
    sampler = training.create_sampling_client()
    params = rs.SamplingParams(max_tokens=4, stop=[])
    sampler.sample(PROMPT, 1, params).result()
    running = training.forward_backward(supervised([500] * 150))
    started, answered = time.monotonic(), 0
    while not running.done():
        sampler.sample(PROMPT, 1, params).result(timeout=30)
        answered += 1
    seconds = time.monotonic() - started
    assert seconds > 3, "the operation was too short to show anything"
    assert answered / seconds > 2


def test_a_pickled_client_samples_from_another_process(training):
    train(training)
    sampler = training.save_weights_and_get_sampling_client()

    @ray.remote(num_cpus=0)
    def sample(client: rs.SamplingClient) -> list[int]:
        params = rs.SamplingParams(max_tokens=20, temperature=0.0, stop=[])
        return client.sample(PROMPT, 1, params).result().sequences[0].tokens

    assert ray.get(sample.remote(sampler)) == _greedy(sampler).tokens


def test_a_sample_in_flight_can_be_cancelled(training):
    sampler = training.create_sampling_client()
    future = sampler.sample(PROMPT, 32, rs.SamplingParams(max_tokens=450, stop=[]))
    assert future.cancel() is True
    with pytest.raises(rs.RequestCancelledError):
        future.result(timeout=30)
    assert _greedy(sampler).tokens
