"""Training ranks that die are replaced, and the run goes on as if they had not. Conformance E5, training part."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import ray
import torch
from datums import supervised
from pools import NO_CPU, PROMPT, greedy
from waiting import wait_for

import raysessions as rs

LONG = (500,) * 16
"""Lengths of a batch that takes a second."""


def config(**settings) -> rs.TrainingConfig:
    return rs.TrainingConfig(**{"num_threads": 1, "actor_options": NO_CPU, **settings})


def ranks() -> set[int]:
    return {p.pid for p in psutil.process_iter(["name"]) if (p.info["name"] or "").startswith("ray::TrainingA")}


def kill(before: set[int], which: int = 0) -> None:
    """One of the ranks that came after `before`."""
    os.kill(sorted(ranks() - before)[which], signal.SIGKILL)


@pytest.fixture
def open_session(service, resident, tiny_model):
    """A session on ranks of its own, and the ranks that others have."""
    opened = []

    def create(**settings):
        before = ranks()
        arguments = {"rank": 8, "seed": 0, "training": config(**settings), "share": False}
        opened.append(service.create_lora_training_client(str(tiny_model), **arguments))
        return opened[-1], before

    yield create
    for training in opened:
        training.stop()


def run(training: rs.TrainingClient, kill_in=(), before=frozenset(), lengths=(20, 7, 50), num_steps: int = 4) -> list[float]:
    """The losses of a few steps of two batches each, with kills in the middle of some."""
    losses = []
    for step in range(num_steps):
        first = training.forward_backward(supervised(lengths, seed=2 * step))
        if step in kill_in:
            kill(before)
        second = training.forward_backward(supervised((30, 3), seed=2 * step + 1))
        training.optim_step(rs.AdamParams(learning_rate=1e-2))
        losses += [first.result(timeout=120).loss, second.result(timeout=120).loss]
    return losses


@pytest.fixture(scope="module")
def undisturbed(service, resident, tiny_model) -> list[float]:
    with service.create_lora_training_client(str(tiny_model), rank=8, seed=0, training=config()) as training:
        return run(training, lengths=LONG)


def test_a_run_whose_ranks_are_killed_in_mid_step_equals_an_undisturbed_one(open_session, undisturbed):
    training, before = open_session()
    assert run(training, kill_in=(0, 2), before=before, lengths=LONG) == undisturbed
    sampler = training.save_weights_and_get_sampling_client("after")
    assert sampler.sample(PROMPT, 1, greedy()).result().sequences
    kill(before)
    time.sleep(1)  # nobody calls: they are replaced at the next call
    path = training.save_state("after the death").result(timeout=60).path
    assert training.load_state_with_optimizer(path).result().step == 4
    assert len(ranks() - before) == 1


def test_ranks_that_hang_are_replaced_too(open_session, undisturbed):
    training, before = open_session(operation_timeout_s=15)
    (rank,) = ranks() - before
    first = training.forward_backward(supervised(LONG)).result().loss
    os.kill(rank, signal.SIGSTOP)
    second = training.forward_backward(supervised((30, 3), seed=1)).result(timeout=120).loss
    assert [first, second] == undisturbed[:2]
    wait_for(lambda: rank not in ranks(), 10)


def test_a_killed_rank_of_two_is_replaced_with_the_other(open_session, undisturbed):
    training, before = open_session(num_workers=2, zero_stage=2, snapshot_every=3)
    assert run(training, kill_in=(1,), before=before, lengths=LONG) == pytest.approx(undisturbed, rel=1e-5)
    assert len(ranks() - before) == 2


def test_all_sessions_of_the_ranks_come_back(service, resident, tiny_model, undisturbed):
    """One in the middle of a step, one with a gradient that it has not used, one loaded from a state."""
    before = ranks()
    own = config(placement_timeout_s=61)
    with (
        service.create_lora_training_client(str(tiny_model), rank=8, seed=0, training=own) as busy,
        service.create_lora_training_client(str(tiny_model), rank=4, seed=5, training=own) as waiting,
        service.create_lora_training_client(str(tiny_model), rank=2, seed=7, training=own) as loaded,
    ):
        assert len(ranks() - before) == 1
        run(loaded, num_steps=1)
        path = loaded.save_state("early").result().path
        run(loaded, num_steps=2)
        loaded.load_state_with_optimizer(path).result()
        calm = loaded.forward(supervised((40,))).result().loss
        waiting.forward_backward(supervised((20,))).result()
        assert run(busy, kill_in=(1,), before=before, lengths=LONG) == undisturbed
        assert loaded.forward(supervised((40,))).result().loss == calm
        assert loaded.save_state("again").result()
        norm = waiting.optim_step().result().metrics["grad_norm:max"]
        waiting.load_state_with_optimizer(waiting.save_state("s").result().path).result()
        assert norm > 0


def test_saves_in_flight_are_done_again_and_failed_operations_are_not(open_session):
    """What had failed had applied nothing; a step that failed had dropped its gradient."""
    training, before = open_session()
    bad = [rs.Datum(rs.ModelInput.from_ints([5, 6]), {"target_tokens": [6, 7], "weights": [1e38, 1e38]})]
    training.forward_backward(supervised((20,)))
    training.forward_backward(bad * 3)
    with pytest.raises(rs.SessionError, match="norm is"):
        training.optim_step().result()
    with pytest.raises(rs.EmptyGradientError):
        training.optim_step().result()
    first = training.forward_backward(supervised((20,))).result().loss
    training.forward_backward(supervised(LONG))
    states = [training.save_state(f"s{i}") for i in range(2)]
    samplers = [training.save_weights_for_sampler(f"w{i}") for i in range(2)]
    kill(before)
    versions = [future.result(timeout=120).version for future in (*states, *samplers)]
    assert len(set(versions)) == 4
    client = training.create_sampling_client(samplers[-1].result().path)
    assert client.sample(PROMPT, 1, greedy()).result().sequences
    assert training.forward(supervised((20,))).result(timeout=60).loss == first
    assert training.optim_step().result().metrics["step:max"] == 1


def test_an_operation_that_kills_its_ranks_each_time_is_given_up_and_the_session_goes_on(open_session):
    training, before = open_session(max_recoveries=1)
    calm = training.forward_backward(supervised((20,))).result().loss
    poison = training.forward_backward(supervised(LONG * 4))
    for _ in range(2):
        wait_for(lambda: ray.get(training._host.phase.remote()) == "ready", timeout_s=60)
        (pid,) = ranks() - before
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: ray.get(training._host.phase.remote()) == "recovering" or poison.done())
    with pytest.raises(rs.TrainingGroupError, match="session goes on"):
        poison.result(timeout=60)
    assert training.forward(supervised((20,))).result(timeout=60).loss == calm
    assert training.optim_step().result().metrics["step:max"] == 1


def test_without_recoveries_the_error_names_what_to_resume_from(service, open_session):
    training, before = open_session(max_recoveries=0)
    path = training.save_state("last").result().path
    running = training.forward_backward(supervised(LONG))
    kill(before)
    with pytest.raises(rs.TrainingGroupError, match=f"Resume from {path}"):
        running.result(timeout=60)
    with pytest.raises(rs.TrainingGroupError, match="max_recoveries=0"):
        training.optim_step().result(timeout=60)
    with service.create_training_client_from_state_with_optimizer(path) as resumed:
        assert resumed.forward_backward(supervised((20,))).result().loss


def test_a_session_that_ends_while_its_ranks_are_replaced_is_gone(open_session):
    training, before = open_session()
    running = training.forward_backward(supervised(LONG))
    kill(before)
    wait_for(lambda: not ranks() - before or running.done() or True)
    training.stop()
    assert isinstance(running.exception(timeout=60), rs.SessionStoppedError)
    wait_for(lambda: ranks() == before)


def test_replicas_of_the_state_are_whole_whatever_the_ranks_hold():
    from raysessions.actors.protocol import RankState, joined
    from raysessions.adapter_weights import AdapterWeights

    weights = AdapterWeights(torch.arange(5).float().numpy(), (("a.lora_A.weight", (5,)),), 1, 1.0, ("a",), 1)
    slices = [{"exp_avg": torch.arange(3 * i, 3 * i + 3).float().numpy()} for i in range(2)]
    state = joined([RankState(weights, slices[0], None, 4), RankState(None, slices[1], None, 4)], seed=9)
    assert state.moments["exp_avg"].tolist() == [0, 1, 2, 3, 4]
    assert (state.step, state.seed) == (4, 9)
