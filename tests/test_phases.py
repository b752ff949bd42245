"""`SamplingConfig(sleep=True)`: training and sampling take turns. On CPU too, where no memory is given back."""

from __future__ import annotations

import time

import pytest
from datums import supervised
from pools import NO_CPU, PROMPT, TRAINING, greedy, status

import raysessions as rs

CONFIG = rs.SamplingConfig(sleep=True, kv_cache_gib=0.25, actor_options=NO_CPU)


@pytest.fixture(scope="module")
def training(service, resident, tiny_model):
    with service.create_lora_training_client(str(tiny_model), rank=4, seed=0, training=TRAINING, sampling=CONFIG) as training:
        training.create_sampling_client().sample(PROMPT, 1, greedy()).result()
        yield training


def test_samples_wait_while_operations_train_and_are_answered_after(training):
    sampler = training.save_weights_and_get_sampling_client("before")
    started = time.monotonic()
    trained = [training.forward_backward(supervised([400] * 30)) for _ in range(3)]
    time.sleep(0.2)  # the first operation has begun
    sample = sampler.sample(PROMPT, 1, greedy())
    trained[-1].result()
    seconds = time.monotonic() - started
    assert seconds > 1, "the operations were too short to show anything"
    assert not sample.done()
    assert sample.result(timeout=30).sequences
    assert status(training).num_queued == 0


def test_an_operation_waits_for_the_samples_that_have_begun(training):
    sampler = training.create_sampling_client()
    samples = [sampler.sample(PROMPT, 4, rs.SamplingParams(max_tokens=450, stop=[])) for _ in range(4)]
    while status(training).replicas[0].num_sequences < 16:
        time.sleep(0.01)
    trained = training.forward_backward(supervised([5])).result()
    assert trained.loss_fn_outputs
    assert all(sample.done() for sample in samples)


def test_a_loop_of_phases_goes_through(training):
    for step in range(3):
        sampler = training.save_weights_and_get_sampling_client(f"step-{step}")
        tokens = sampler.sample(PROMPT, 2, greedy()).result(timeout=60).sequences[0].tokens
        training.forward_backward([rs.datum_for_supervised([*PROMPT.to_ints(), *tokens], [1.0] * (PROMPT.length + 20))])
        training.optim_step().result(timeout=60)
    assert training.save_weights_for_sampler("end").result(timeout=60).version >= 4


def test_sampling_and_training_overlap_without_it(service, resident, tiny_model):
    with service.create_lora_training_client(str(tiny_model), rank=4) as training:
        sampler = training.create_sampling_client()
        sampler.sample(PROMPT, 1, greedy(2)).result()
        running = training.forward_backward(supervised([500] * 150))
        assert sampler.sample(PROMPT, 1, greedy(2)).result(timeout=30).sequences
        assert not running.done()
        running.result()
