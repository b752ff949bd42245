"""Replicas that die or hang under requests. Conformance E5, the replica's part; real vLLM on CPU."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from pools import PROMPT, greedy, status, teach, tokens_of
from waiting import wait_for

import raysessions as rs

NOTICED_WITHIN_S = 10
BACK_WITHIN_S = 90


@pytest.fixture(scope="module")
def training(pooled_service, tiny_model):
    with pooled_service.create_lora_training_client(str(tiny_model), rank=4, seed=0) as training:
        yield training


@pytest.fixture
def replica(training) -> psutil.Process:
    """One of two healthy replicas."""
    wait_for(lambda: len(status(training).replicas) == 2, BACK_WITHIN_S)
    return psutil.Process(status(training).replicas[0].pid)


@pytest.fixture(scope="module")
def samplers(training) -> dict[int, rs.SamplingClient]:
    """Two versions by the token that each answers with."""
    samplers = {}
    for token in (100, 200):
        teach(training, token)
        samplers[token] = training.save_weights_and_get_sampling_client(str(token))
    return samplers


def send(samplers: dict[int, rs.SamplingClient], count: int, max_tokens: int) -> list[tuple[int, rs.APIFuture]]:  # type: ignore[type-arg]
    return [(token, sampler.sample(PROMPT, 1, greedy(max_tokens))) for _ in range(count) for token, sampler in samplers.items()]


def assert_all_right(futures: list[tuple[int, rs.APIFuture]]) -> None:  # type: ignore[type-arg]
    for token, future in futures:
        assert all(tokens[:20] == [token] * 20 for tokens in tokens_of([future], timeout=BACK_WITHIN_S))


def engine_of(replica: psutil.Process) -> psutil.Process:
    """vLLM's process, which not every system names so. The others of the replica's only look after what it leaves."""
    return max(replica.children(), key=lambda child: child.memory_info().rss)


def assert_gone(processes: list[psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


def test_a_replica_killed_in_mid_sample_loses_no_request_and_comes_back_with_its_versions(training, samplers, replica):
    family = [replica, *replica.children(recursive=True)]
    shared_memory = _shared_memory()
    futures = send(samplers, 40, 200)
    wait_for(lambda: any(future.done() for _, future in futures))
    replica.send_signal(signal.SIGKILL)
    assert_gone(family, within_s=5)
    wait_for(lambda: len(status(training).replicas) == 1, NOTICED_WITHIN_S)
    assert_all_right(futures)
    wait_for(lambda: len(status(training).replicas) == 2, BACK_WITHIN_S)
    assert all(len(replica.adapter_ids) >= 2 for replica in status(training).replicas)
    assert_all_right(send(samplers, 20, 20))
    assert _shared_memory() <= shared_memory


def _shared_memory() -> int:
    """Files of ours and of vLLM in shared memory."""
    return len(list(Path("/dev/shm").glob("psm_*"))) + len(list(Path("/dev/shm").glob("raysessions-*")))


def test_a_dead_engine_is_replaced_and_its_requests_answered(training, samplers, replica):
    engine = engine_of(replica)
    futures = send(samplers, 20, 200)
    engine.send_signal(signal.SIGKILL)
    wait_for(lambda: len(status(training).replicas) == 1, NOTICED_WITHIN_S)
    assert_all_right(futures)
    assert_gone([replica, engine], within_s=10)


@pytest.mark.parametrize("part", ["actor", "engine"])
def test_a_stuck_replica_is_noticed_replaced_and_leaves_no_process(training, samplers, replica, part):
    engine = engine_of(replica)
    family = [replica, *replica.children(recursive=True)]
    victim = {"actor": replica, "engine": engine}[part]
    futures = send(samplers, 20, 100)
    victim.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    wait_for(lambda: len(status(training).replicas) == 1, NOTICED_WITHIN_S + 2)
    assert time.monotonic() - started < NOTICED_WITHIN_S + 1  # the test itself looks ten times a second
    assert_all_right(futures)
    assert_gone(family, within_s=15)


def test_when_the_only_replica_dies_requests_and_saves_wait_for_its_return(pooled_service, training, samplers, replica):
    pooled_service.scale_samplers(1)
    os.kill(status(training).replicas[0].pid, signal.SIGKILL)
    saved = training.save_weights_for_sampler("while it is away")
    assert_all_right(send(samplers, 5, 20))
    assert saved.result(timeout=BACK_WITHIN_S).version == 3
    pooled_service.scale_samplers(2)
