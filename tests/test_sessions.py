"""Sessions that share one loaded base model. Conformance B1 to B4; the sums of two ranks are in test_ranks.py."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
import ray
from datums import loss, supervised
from ranks import batch_of
from waiting import wait_for

import raysessions as rs
from raysessions import losses
from raysessions.config import LoraConfig

DATA = supervised((6, 9, 40, 3))


def _training_pids() -> set[int]:
    return {process.pid for process in psutil.process_iter() if process.name().startswith("ray::TrainingA")}


def _logprobs(training: rs.TrainingClient) -> list[list[float]]:
    return [output["logprobs"].tolist() for output in training.forward(DATA).result().loss_fn_outputs]


def test_get_info_says_who_shares_the_base(service, resident, tiny_model):
    before = len(_training_pids())
    with service.create_lora_training_client(str(tiny_model), name="one") as one:
        with service.create_lora_training_client(str(tiny_model), name="two", rank=2) as two:
            assert one.get_info().sharing == ("resident", "two")
            assert two.get_info().sharing == ("one", "resident")
            assert len(_training_pids()) == before
        assert one.get_info().sharing == ("resident",)


def test_a_session_that_does_not_share_has_a_base_of_its_own(service, resident, tiny_model):
    before = len(_training_pids())
    config = rs.TrainingConfig(num_threads=1, actor_options={"num_cpus": 0})
    with (
        service.create_lora_training_client(str(tiny_model), training=config, share=False) as one,
        service.create_lora_training_client(str(tiny_model), training=config, share=False) as two,
    ):
        assert one.get_info().sharing == two.get_info().sharing == ()
        assert len(_training_pids()) == before + 2
        assert _logprobs(one) == _logprobs(two)


def test_sessions_that_share_train_as_each_would_alone(service, resident, tiny_model):
    def steps(training: rs.TrainingClient, seed: int) -> list[list[float]]:
        for step in range(3):
            training.forward_backward(supervised((20, 7, 50), seed=10 * seed + step))
            training.optim_step(rs.AdamParams(learning_rate=1e-2))
        return _logprobs(training)

    def create(rank: int):
        return service.create_lora_training_client(str(tiny_model), rank=rank, seed=rank)

    alone = []
    for rank in (2, 5, 8):
        with create(rank) as training:
            alone.append(steps(training, rank))
    together: dict[int, list[list[float]]] = {}
    with create(2) as two, create(5) as five, create(8) as eight:
        clients = {2: two, 5: five, 8: eight}
        threads = [
            threading.Thread(target=lambda rank=rank: together.update({rank: steps(clients[rank], rank)})) for rank in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [together[rank] for rank in (2, 5, 8)] == alone


def test_an_operation_overtakes_another_sessions_queue(service, resident, tiny_model):
    long = supervised((400, 300, 500))
    with service.create_lora_training_client(str(tiny_model), rank=8) as busy:
        futures = [busy.forward_backward(long) for _ in range(40)]
        started = time.perf_counter()
        resident.forward(supervised((5,))).result()
        waited = time.perf_counter() - started
        num_done = sum(future.done() for future in futures)
        futures[-1].result()
        total = time.perf_counter() - started
    assert num_done < 10
    assert waited < total / 4


def test_eight_sessions_get_fair_shares(service, resident, tiny_model):
    """All send as fast as they can, one of them batches eight times as large: tokens are shared, not calls."""
    clients = [service.create_lora_training_client(str(tiny_model), rank=4) for _ in range(8)]
    try:
        sizes = [64] * 7 + [512]
        counts = [0] * 8
        end = time.perf_counter() + 6

        def flood(index: int) -> None:
            data = supervised((sizes[index] // 2,) * 2, seed=index)
            waiting = [clients[index].forward_backward(data) for _ in range(12)]
            while time.perf_counter() < end:
                waiting.pop(0).result()
                counts[index] += 1
                waiting.append(clients[index].forward_backward(data))

        threads = [threading.Thread(target=flood, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tokens = [count * size for count, size in zip(counts, sizes, strict=True)]
        assert min(tokens) > 0.5 * sum(tokens) / 8, tokens
    finally:
        for client in clients:
            client.stop()


def test_memory_grows_by_the_adapters_state_per_session(engine_factory):
    engine = engine_factory()
    batch = batch_of(DATA)

    def add(index: int) -> None:
        engine.add_session(str(index), LoraConfig(rank=512, alpha=32, seed=index))
        engine.run_loss(str(index), batch, loss(), backward=True)
        engine.optim_step(str(index), rs.AdamParams())

    for index in range(3):
        add(index)
    before = psutil.Process().memory_info().rss
    for index in range(3, 11):
        add(index)
    grown = (psutil.Process().memory_info().rss - before) / 8
    state = 16 * engine._adapters["0"].num_parameters
    assert state > 10e6
    assert grown < 1.2 * state


def test_a_failed_operation_of_one_session_leaves_the_others_as_they_were(service, resident, tiny_model):
    def fail(logprobs_T, inputs, config):
        raise MemoryError("out of memory")

    rs.register_loss(rs.LossSpec("failing", inputs=("weights",)), fail)
    try:
        with (
            service.create_lora_training_client(str(tiny_model), rank=8, seed=0) as healthy,
            service.create_lora_training_client(str(tiny_model), rank=8, seed=0) as twin,
            service.create_lora_training_client(str(tiny_model), rank=8, seed=1) as failing,
        ):
            for training in (healthy, twin):
                training.forward_backward(DATA)
            failures = [failing.forward_backward(DATA, "failing") for _ in range(3)]
            step = healthy.optim_step(rs.AdamParams(learning_rate=1e-2))
            failures += [failing.forward_backward(DATA, "failing")]
            for failure in failures:
                with pytest.raises(MemoryError, match="out of memory"):
                    failure.result()
            assert step.result().metrics["step:max"] == 1
            twin.optim_step(rs.AdamParams(learning_rate=1e-2)).result()
            assert _logprobs(healthy) == _logprobs(twin)
            with pytest.raises(rs.EmptyGradientError):
                failing.optim_step().result()
            assert failing.forward_backward(DATA).result().loss_fn_outputs
    finally:
        losses.LOSSES.pop("failing")
        losses.FUNCTIONS.pop("failing")


@pytest.fixture(scope="module")
def two_ranks(service, resident, tiny_model):
    """A session on two ranks of ZeRO stage 3."""
    config = rs.TrainingConfig(num_workers=2, zero_stage=3, num_threads=1, actor_options={"num_cpus": 0})
    with service.create_lora_training_client(str(tiny_model), rank=8, seed=0, training=config) as training:
        yield training


def test_two_ranks_of_stage_3_answer_as_one_rank_does(two_ranks, training):
    assert (two_ranks.get_info().num_workers, two_ranks.get_info().zero_stage) == (2, 3)
    for data in (DATA, supervised((11,)), supervised((1, 2, 3, 4, 500))):
        ours, one = two_ranks.forward_backward(data).result(), training.forward_backward(data).result()
        assert ours.metrics["loss:sum"] == pytest.approx(one.metrics["loss:sum"], rel=1e-5)
        for our, their in zip(ours.loss_fn_outputs, one.loss_fn_outputs, strict=True):
            assert our["logprobs"].tolist() == pytest.approx(their["logprobs"].tolist(), abs=2e-5)
    adam = rs.AdamParams(learning_rate=1e-2)
    norms = [session.optim_step(adam).result().metrics["grad_norm:max"] for session in (two_ranks, training)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for ours, theirs in zip(_logprobs(two_ranks), _logprobs(training), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_loss_that_fails_on_one_rank_fails_the_call_everywhere_and_the_next_one_runs(two_ranks):
    def fail_on_token_7(logprobs_T, inputs, config):
        if (inputs["weights"] == 7.0).any():
            raise ValueError("not this one")
        return -inputs["weights"] * logprobs_T

    rs.register_loss(rs.LossSpec("failing", inputs=("weights",)), fail_on_token_7)
    try:
        data = supervised((30, 40))
        data[1].loss_fn_inputs["weights"][3] = 7.0
        for _ in range(2):
            with pytest.raises(ValueError, match="not this one"):
                two_ranks.forward_backward(data, "failing").result()
        with pytest.raises(rs.EmptyGradientError):
            two_ranks.optim_step().result()
        assert two_ranks.forward_backward(data).result().loss_fn_outputs
        assert two_ranks.optim_step().result().metrics["grad_norm:max"] > 0
    finally:
        losses.LOSSES.pop("failing")
        losses.FUNCTIONS.pop("failing")


def test_two_ranks_publish_to_the_sampler(two_ranks):
    sampler = two_ranks.save_weights_and_get_sampling_client("from-two-ranks")
    comparison = rs.diagnostics.compare_logprobs(two_ranks, sampler, [[5, 6, 7], [8, 9]], max_tokens=20)
    assert comparison.max_abs < 1e-4
    assert comparison.num_tokens >= 2


def test_ranks_are_placed_where_their_labels_say(service, resident, tiny_model):
    node = ray.nodes()[0]["Labels"]["ray.io/node-id"]
    options = {"num_cpus": 0, "memory": 50 * 2**20}
    here = rs.TrainingConfig(num_workers=2, actor_options={**options, "label_selector": {"ray.io/node-id": node}})
    with service.create_lora_training_client(str(tiny_model), training=here) as training:
        assert training.forward_backward(DATA).result().loss_fn_outputs
    nowhere = {**options, "label_selector": {"ray.io/node-id": "elsewhere"}}
    config = rs.TrainingConfig(num_workers=2, actor_options=nowhere, placement_timeout_s=2)
    with pytest.raises(rs.PlacementError, match="No room for 2 TrainingActors within 2 s"):
        service.create_lora_training_client(str(tiny_model), training=config)


def test_ranks_that_ask_for_resources_are_placed_together_and_give_them_back(service, resident, tiny_model):
    free = ray.available_resources().get("memory", 0)
    asked = 100 * 2**20
    options = {"num_cpus": 0, "memory": asked}
    config = rs.TrainingConfig(num_workers=2, num_threads=1, actor_options=options)
    with service.create_lora_training_client(str(tiny_model), training=config) as training:
        assert ray.available_resources()["memory"] == pytest.approx(free - 2 * asked)
        assert training.forward_backward(DATA).result().loss_fn_outputs
    wait_for(lambda: ray.available_resources()["memory"] == pytest.approx(free))
