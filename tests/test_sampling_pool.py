"""A pool of two replicas: scaling, versions in turns, fairness, deadlines. Conformance D8; real vLLM on CPU."""

from __future__ import annotations

import threading
import time

import pytest
import ray
from pools import NO_CPU, PROMPT, TRAINING, greedy, status, teach, tokens_of
from waiting import wait_for

import raysessions as rs

CONFIG = rs.SamplingConfig(num_replicas=2, kv_cache_gib=0.25, max_loras=2, max_live_versions=4, max_num_seqs=8)
FREE = rs.SamplingParams(max_tokens=20, stop=[])


@pytest.fixture(scope="module")
def own_service(service, resident):
    """A client of its own, so that scaling does not reach the other tests' samplers. Memory has room for three replicas."""
    memory = int(0.3 * ray.available_resources()["memory"])
    config = CONFIG.model_copy(update={"actor_options": {**NO_CPU, "memory": memory}, "placement_timeout_s": 20})
    with rs.ServiceClient(training=TRAINING, sampling=config) as own:
        yield own


@pytest.fixture(scope="module")
def small(service, resident, tiny_model):
    """A sampler of one replica with a short queue and little time."""
    update = {"num_replicas": 1, "max_queued_requests": 20, "request_timeout_s": 3.0, "actor_options": NO_CPU}
    return service.create_sampling_client(base_model=str(tiny_model), sampling=CONFIG.model_copy(update=update))


@pytest.fixture(scope="module")
def kept(own_service, resident, tiny_model):
    """A session that keeps the pool running for this file."""
    with own_service.create_lora_training_client(str(tiny_model), rank=4, seed=1, name="pool") as training:
        training.create_sampling_client()
        yield training


@pytest.fixture
def training(own_service, kept, tiny_model):
    with own_service.create_lora_training_client(str(tiny_model), rank=4, seed=0) as training:
        yield training


def test_a_new_replica_has_every_live_version_before_it_serves_and_a_leaving_one_loses_nothing(own_service, training):
    teach(training, 100)
    samplers = [training.save_weights_and_get_sampling_client(f"v{i}") for i in range(3)]
    expected = [100] * 20
    futures = [sampler.sample(PROMPT, 1, greedy()) for _ in range(40) for sampler in samplers]
    own_service.scale_samplers(3)
    replicas = status(training).replicas
    assert len(replicas) == 3
    assert all(len(replica.adapter_ids) >= 3 for replica in replicas)
    futures += [sampler.sample(PROMPT, 1, greedy(200)) for _ in range(30) for sampler in samplers]
    with pytest.raises(rs.PlacementError, match="SamplingActor"):
        own_service.scale_samplers(4)
    assert len(status(training).replicas) == 3
    own_service.scale_samplers(2)
    assert len(status(training).replicas) == 2
    assert all(tokens[:20] == expected for tokens in tokens_of(futures))
    with pytest.raises(rs.ConfigError, match="at least 1"):
        own_service.scale_samplers(0)


def test_more_versions_than_a_batch_holds_all_answer_and_none_crosses(training):
    """Four live versions and max_loras=2: they take turns, and evicted ones are loaded again."""
    samplers = {}
    for token in (100, 110, 120, 130, 140, 150):
        teach(training, token)
        samplers[token] = training.save_weights_and_get_sampling_client(str(token))
    futures = [(token, sampler.sample(PROMPT, 1, greedy())) for _ in range(20) for token, sampler in samplers.items()]
    assert all(future.result(timeout=120).sequences[0].tokens == [token] * 20 for token, future in futures)
    assert all(len(replica.adapter_ids) <= CONFIG.max_resident_loras for replica in status(training).replicas)


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


def test_marker_tokens_never_cross_while_versions_come_and_go(own_service, training, tiny_model):
    with own_service.create_lora_training_client(str(tiny_model), rank=8, seed=5) as other:
        sessions = {training: 100, other: 200}
        for session, token in sessions.items():
            teach(session, token)
        wrong, count = [], 0
        futures: list[tuple[int, rs.APIFuture]] = []  # type: ignore[type-arg]
        samplers = {session: session.save_weights_and_get_sampling_client("first") for session in sessions}
        for step in range(25):
            for session, token in sessions.items():
                futures += [(token, samplers[session].sample(PROMPT, 1, greedy(8))) for _ in range(10)]
                if step % 2:
                    samplers[session] = session.save_weights_and_get_sampling_client(f"step-{step}")
        for token, future in futures:
            count += 1
            wrong += [tokens for tokens in tokens_of([future]) if tokens != [token] * 8]
    assert count == 500
    assert wrong == []


def test_a_client_with_2000_samples_in_flight_does_not_hold_up_another(training):
    teach(training, 100)
    sampler = training.save_weights_and_get_sampling_client("many")
    other = training.create_sampling_client()
    started = time.monotonic()
    many = [sampler.sample(PROMPT, 1, greedy()) for _ in range(2000)]
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
