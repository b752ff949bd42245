"""A pool of two replicas: scaling, versions in turns, fairness, deadlines. Conformance D8; real vLLM on CPU."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray
from pools import NO_CPU, POOL, PROMPT, greedy, status, teach, tokens_of
from waiting import wait_for

import raysessions as rs

FREE = rs.SamplingParams(max_tokens=20, stop=[])


@pytest.fixture(scope="module")
def small(service, resident, tiny_model):
    """A sampler of one replica with a short queue and little time."""
    update = {"num_replicas": 1, "max_queued_requests": 20, "request_timeout_s": 10.0, "actor_options": NO_CPU}
    return service.create_sampling_client(base_model=str(tiny_model), sampling=POOL.model_copy(update=update))


@pytest.fixture
def training(pooled_service, tiny_model):
    with pooled_service.create_lora_training_client(str(tiny_model), rank=4, seed=0) as training:
        yield training


def test_a_new_replica_has_every_live_version_before_it_serves_and_a_leaving_one_loses_nothing(pooled_service, training):
    teach(training, 100)
    samplers = [training.save_weights_and_get_sampling_client(f"v{i}") for i in range(3)]
    expected = [100] * 20
    futures = [sampler.sample(PROMPT, 1, greedy()) for _ in range(40) for sampler in samplers]
    pooled_service.scale_samplers(3)
    replicas = status(training).replicas
    assert len(replicas) == 3
    assert all(len(replica.adapter_ids) >= 3 for replica in replicas)
    futures += [sampler.sample(PROMPT, 1, greedy(200)) for _ in range(30) for sampler in samplers]
    with pytest.raises(rs.PlacementError, match="SamplingActor"):
        pooled_service.scale_samplers(4)
    assert len(status(training).replicas) == 3
    pooled_service.scale_samplers(2)
    assert len(status(training).replicas) == 2
    assert all(tokens[:20] == expected for tokens in tokens_of(futures))
    with pytest.raises(rs.ConfigError, match="at least 1"):
        pooled_service.scale_samplers(0)


def test_a_version_gets_its_turn_while_others_are_never_idle(training):
    samplers = {}
    for token in (100, 110, 120, 130, 140):
        teach(training, token)
        samplers[token] = training.save_weights_and_get_sampling_client(str(token))
    late = samplers.pop(140)
    stop = threading.Event()
    answered = dict.fromkeys(samplers, 0)

    def keep_busy(token: int) -> None:
        while not stop.is_set():
            answered[token] += len(tokens_of([samplers[token].sample(PROMPT, 1, greedy()) for _ in range(10)]))

    threads = [threading.Thread(target=keep_busy, args=(token,)) for token in samplers]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1)
        assert late.sample(PROMPT, 1, greedy()).result(timeout=20).sequences[0].tokens == [140] * 20
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert all(answered.values())


def test_a_client_with_2000_samples_in_flight_does_not_hold_up_another(training):
    teach(training, 100)
    sampler = training.save_weights_and_get_sampling_client("many")
    other = training.create_sampling_client()
    many = [sampler.sample(PROMPT, 1, greedy()) for _ in range(2000)]
    assert status(training).num_queued > 500  # answered when the pool has taken what was sent before
    started = time.monotonic()
    assert other.sample(PROMPT, 1, greedy()).result(timeout=60).sequences[0].tokens == [100] * 20
    waited = time.monotonic() - started
    assert not many[-1].done()
    assert all(tokens == [100] * 20 for tokens in tokens_of(many))
    assert waited < 0.2 * (time.monotonic() - started)


def test_requests_beyond_the_bound_are_refused_and_the_rest_answered(small):
    small.sample(PROMPT, 1, FREE).exception(timeout=60)  # the first one compiles
    futures = [small.sample(PROMPT, 1, FREE) for _ in range(200)]
    errors = [future.exception(timeout=60) for future in futures]
    refused = [error for error in errors if error is not None]
    assert refused
    assert all(isinstance(error, rs.BackPressureError) for error in refused)
    assert "max_queued_requests" in str(refused[0])
    assert errors.count(None) >= 20
    assert small.sample(PROMPT, 1, FREE).result(timeout=60).sequences


def test_a_sample_past_its_deadline_is_given_up_also_in_vllm(small):
    future = small.sample(PROMPT, 200, rs.SamplingParams(max_tokens=450, stop=[]))
    with pytest.raises(rs.RequestTimeoutError, match="request_timeout_s"):
        future.result(timeout=60)
    wait_for(lambda: ray.get(small._pool.num_unfinished.remote()) == 0)
    assert small.sample(PROMPT, 1, FREE).result(timeout=60).sequences


def test_cancellation_reaches_vllm_and_what_waits(training):
    sampler = training.create_sampling_client()
    futures = [sampler.sample(PROMPT, 1, rs.SamplingParams(max_tokens=450, stop=[])) for _ in range(200)]
    wait_for(lambda: ray.get(training._pool.num_unfinished.remote()) > 0)
    assert all(future.cancel() for future in futures)
    for future in futures:
        assert isinstance(future.exception(timeout=30), rs.RequestCancelledError)
    wait_for(lambda: ray.get(training._pool.num_unfinished.remote()) == 0)
    wait_for(lambda: status(training).num_queued == 0)
    assert all(replica.num_sequences == replica.outstanding_tokens == 0 for replica in status(training).replicas)


def test_a_version_outlives_the_object_store_and_its_sessions_host(pooled_service, training, tiny_model):
    """The host owns the weights in the store. A version evicted from the engines is then read from the registry."""
    hosts = _hosts()
    with pooled_service.create_lora_training_client(str(tiny_model), rank=4, seed=0, share=False) as lost:
        teach(lost, 100)
        sampler = lost.save_weights_and_get_sampling_client("survivor")
        assert sampler.sample(PROMPT, 1, greedy()).result().sequences[0].tokens == [100] * 20
        copy = Path(pooled_service._settings.output_uri) / "versions" / sampler.version.removeprefix("raysessions://")
        wait_for(lambda: (copy / "manifest.json").exists())
        (host,) = _hosts() - hosts
        os.kill(host, signal.SIGKILL)
        for i in range(POOL.max_resident_loras + 1):
            training.save_weights_for_sampler(f"pushes-it-out-{i}").result()
        assert sampler.sample(PROMPT, 1, greedy()).result(timeout=60).sequences[0].tokens == [100] * 20


def _hosts() -> set[int]:
    return {p.pid for p in psutil.process_iter(["name"]) if (p.info["name"] or "").startswith("ray::ModelHost")}
