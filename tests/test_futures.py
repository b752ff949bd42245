"""Order, futures and errors of a live session. Conformance C1, C3, C4."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time

import numpy as np
import pytest
import ray
from datums import supervised

import raysessions as rs

LONG = supervised([500] * 60)
"""A batch that keeps the trainer busy for seconds."""


def _logprobs(output: rs.ForwardBackwardOutput) -> np.ndarray:
    return np.concatenate([datum["logprobs"].to_numpy() for datum in output.loss_fn_outputs])


def test_optim_step_called_before_forward_backward_has_finished_runs_after_it(training):
    forward_backward = training.forward_backward(LONG)
    optim_step = training.optim_step()
    assert not forward_backward.done()
    assert optim_step.result().metrics["grad_norm:max"] > 0
    assert forward_backward.done()
    with pytest.raises(rs.EmptyGradientError):
        training.optim_step().result()


def test_operations_of_two_threads_run_in_the_order_of_their_calls(training):
    data = supervised([20])
    order: list[rs.APIFuture] = []
    lock = threading.Lock()

    def run() -> None:
        for _ in range(10):
            with lock:  # the order of the calls is the order in this list
                order.append(training.forward_backward(data))
                order.append(training.optim_step(rs.AdamParams(learning_rate=1e-2)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steps = [future.result().metrics["step:max"] for future in order[1::2]]
    assert steps == list(range(1, 21))


def test_calls_return_at_once_while_a_long_step_runs(training):
    small = supervised([30] * 8)
    training.forward_backward(small).result()
    training.optim_step().result()
    running = training.forward_backward(LONG)
    seconds = []
    for _ in range(10):
        for call in (lambda: training.forward_backward(small), training.optim_step):
            started = time.perf_counter()
            last = call()
            seconds.append(time.perf_counter() - started)
    assert not running.done(), "the long step was too short to show anything"
    assert max(seconds) < 0.020
    last.result()


def test_done_turns_true_by_itself(training):
    future = training.forward_backward(LONG)
    assert not future.done()
    deadline = time.monotonic() + 60
    while not future.done() and time.monotonic() < deadline:
        ray.wait([future], timeout=0.1)
    assert future.done()


@ray.remote(num_cpus=0)
def _loss_of(output: rs.ForwardBackwardOutput) -> float:
    return output.loss


@ray.remote(num_cpus=0)
def _loss_of_nested(futures: list[rs.APIFuture]) -> float:
    return ray.get(futures[0]).loss


@ray.remote(num_cpus=0)
def _loss_of_pickled(pickled: bytes) -> float:
    return pickle.loads(pickled).result().loss


def test_every_way_to_wait_gives_the_same_value(training):
    future = training.forward(supervised([12, 7]))
    loss = future.result().loss

    async def awaited() -> list[float]:
        return [(await future).loss, *(output.loss for output in await asyncio.gather(future, future))]

    assert ray.get(future).loss == loss
    assert ray.wait([future]) == ([future], [])
    assert asyncio.run(awaited()) == [loss] * 3
    assert ray.get(_loss_of.remote(future)) == loss
    assert ray.get(_loss_of_nested.remote([future])) == loss
    assert ray.get(_loss_of_pickled.remote(ray.cloudpickle.dumps(future))) == loss
    assert future.exception() is None


def test_result_in_an_event_loop_is_refused_with_what_to_do(training):
    future = training.forward(supervised([5]))

    async def blocks() -> None:
        future.result()

    with pytest.raises(RuntimeError, match="use `await future`"):
        asyncio.run(blocks())


def test_errors_arrive_with_class_message_and_cause(training):
    future = training.optim_step()
    with pytest.raises(rs.EmptyGradientError, match="call forward_backward first") as caught:
        future.result()
    assert isinstance(caught.value.__cause__, ray.exceptions.RayTaskError)
    assert isinstance(future.exception(), rs.EmptyGradientError)
    with pytest.raises(rs.EmptyGradientError):
        ray.get(future)

    async def awaited() -> None:
        await future

    with pytest.raises(rs.EmptyGradientError):
        asyncio.run(awaited())


def test_a_time_out_leaves_the_operation_running_and_the_result_retrievable(training):
    future = training.forward_backward(LONG)
    with pytest.raises(rs.RequestTimeoutError, match="goes on"):
        future.result(timeout=0.05)
    assert future.result().metrics["weight:sum"] == pytest.approx(
        sum(datum.loss_fn_inputs["weights"].sum() for datum in LONG), rel=1e-5
    )


def test_a_queued_operation_can_be_cancelled_and_the_next_ones_run(training):
    data = supervised([10])
    futures = [training.forward(LONG) for _ in range(4)]
    cancelled = training.forward_backward(data)
    assert cancelled.cancel() is True
    last = training.forward(data)
    with pytest.raises(rs.RequestCancelledError):
        cancelled.result()
    assert last.result().loss == pytest.approx(training.forward(data).result().loss)
    assert last.cancel() is False
    assert len({future.result().loss for future in futures}) == 1
    with pytest.raises(rs.EmptyGradientError):  # the cancelled operation added nothing
        training.optim_step().result()


def test_a_repeated_number_applies_nothing_twice(training):
    """What a client that lost its connection does: it sends the same operation again."""
    data = supervised([15])
    first = training.forward_backward(data)
    op = training._loss_op(data, "cross_entropy", None, backward=True)
    again = training._host.submit.remote(training.get_info().session_id, 1, op)
    assert ray.get(again).loss == first.result().loss
    once = training.optim_step().result().metrics["grad_norm:max"]
    training.forward_backward(data).result()
    # lr of the first step moved the weights; a fresh session gives the norm of a single gradient.
    assert once == pytest.approx(_single_norm(training, data), rel=1e-6)


def _single_norm(training: rs.TrainingClient, data: list[rs.Datum]) -> float:
    info = training.get_info()
    with rs.ServiceClient() as service, service.create_lora_training_client(info.base_model, rank=8, seed=0) as fresh:
        fresh.forward_backward(data)
        return fresh.optim_step().result().metrics["grad_norm:max"]


def test_two_losses_back_to_back_have_metrics_of_their_own(training):
    a, b = supervised([30]), supervised([11], seed=4)
    alone = [training.forward(data).result().metrics["loss:sum"] for data in (a, b)]
    futures = [training.forward_backward(data) for data in (a, b)]
    assert [future.result().metrics["loss:sum"] for future in futures] == pytest.approx(alone, rel=1e-6)


def test_a_stopped_session_refuses_with_a_sentence(service, resident, tiny_model):
    training = service.create_lora_training_client(str(tiny_model), rank=8)
    pending = [training.forward_backward(LONG) for _ in range(4)]
    training.stop()
    training.stop()
    with pytest.raises(rs.SessionStoppedError, match="Create a new one"):
        training.optim_step()
    with pytest.raises(rs.SessionStoppedError):
        pending[-1].result()
