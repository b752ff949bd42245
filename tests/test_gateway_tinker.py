"""The unmodified tinker package against a served gateway. Conformance F1, F3; real DeepSpeed and vLLM on CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from faulty_proxy import FaultyProxy, served
from tinker import types
from tinker_runs import LORA, TOKENS, datum, run

import raysessions as rs

ADAM = types.AdamParams(learning_rate=3e-3)


@pytest.fixture(scope="module")
def client(gateway, sdk):
    with tinker.ServiceClient(base_url=gateway.url, api_key=gateway.key) as client:
        yield client


@pytest.fixture(scope="module")
def training(client, gateway):
    return client.create_lora_training_client(gateway.base_model, **LORA)


def our_datum(tokens=TOKENS) -> rs.Datum:
    return rs.datum_for_supervised(tokens, [1.0] * len(tokens))


def greedy(max_tokens: int = 5) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=max_tokens, temperature=0)


def prompt(tokens=(5, 6, 7)) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def without_times(metrics):
    return {name: value for name, value in metrics.items() if "seconds" not in name}


def test_a_run_computes_what_our_own_client_computes(client, gateway):
    training = client.create_lora_training_client(gateway.base_model, **LORA)
    with gateway.service.create_lora_training_client(gateway.base_model, rank=8, seed=0) as ours:
        for _ in range(3):
            futures = training.forward_backward([datum(), datum(TOKENS[:9])], "cross_entropy"), training.optim_step(ADAM)
            expected = (
                ours.forward_backward([our_datum(), our_datum(TOKENS[:9])]),
                ours.optim_step(rs.AdamParams(learning_rate=3e-3)),
            )
            output, step = (future.result() for future in futures)
            our_output, our_step = (future.result() for future in expected)
            assert without_times(output.metrics) == without_times(our_output.metrics)
            assert without_times(step.metrics) == without_times(our_step.metrics)
            for theirs, mine in zip(output.loss_fn_outputs, our_output.loss_fn_outputs, strict=True):
                assert np.array_equal(theirs["logprobs"].to_numpy(), mine["logprobs"].to_numpy())


def test_it_learns_saves_and_samples_what_it_learned(client, training):
    first = training.forward([datum()], "cross_entropy").result().metrics["loss:sum"]
    for _ in range(12):
        training.forward_backward([datum()], "cross_entropy")
        last = training.optim_step(types.AdamParams(learning_rate=2e-2))
    last.result()
    assert training.forward([datum()], "cross_entropy").result().metrics["loss:sum"] < 0.5 * first
    sampler = training.save_weights_and_get_sampling_client()
    sample = sampler.sample(prompt(TOKENS[:5]), num_samples=2, sampling_params=greedy(8)).result()
    assert [list(sequence.tokens) for sequence in sample.sequences] == [TOKENS[5:13]] * 2
    assert all(len(sequence.logprobs) == 8 for sequence in sample.sequences)
    logprobs = sampler.compute_logprobs(prompt(TOKENS)).result()
    learned = training.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    assert logprobs[0] is None
    assert np.allclose(logprobs[1:], learned, atol=2e-2)


def test_a_run_goes_on_from_a_state_as_if_it_had_not_stopped(client, training):
    training.forward_backward([datum()], "cross_entropy").result()
    training.optim_step(ADAM).result()
    path = training.save_state("here").result().path
    assert path.startswith(f"tinker://{training.model_id}/weights/")
    resumed = client.create_training_client_from_state_with_optimizer(path)
    fresh = client.create_training_client_from_state(path)
    assert resumed.get_info().lora_rank == 8
    outputs = []
    for one in (training, resumed, fresh):
        for _ in range(2):
            one.forward_backward([datum()], "cross_entropy").result()
            one.optim_step(ADAM).result()
        outputs.append(one.forward([datum()], "cross_entropy").result().metrics["loss:sum"])
    assert outputs[0] == outputs[1] != outputs[2]
    training.load_state_with_optimizer(path).result()
    for _ in range(2):
        training.forward_backward([datum()], "cross_entropy").result()
        training.optim_step(ADAM).result()
    assert training.forward([datum()], "cross_entropy").result().metrics["loss:sum"] == outputs[0]


def test_chunks_of_a_large_batch_add_up(client, gateway):
    """2,500 datums are three requests, of which the SDK sends the first one last."""
    training = client.create_lora_training_client(gateway.base_model, **LORA)
    rng = np.random.default_rng(0)
    rows = [rng.integers(5, 200, size=5).tolist() for _ in range(2500)]
    output = training.forward_backward([datum(row) for row in rows], "cross_entropy").result()
    norm = training.optim_step(ADAM).result().metrics["grad_norm:max"]
    with gateway.service.create_lora_training_client(gateway.base_model, rank=8, seed=0) as ours:
        expected = ours.forward_backward([our_datum(row) for row in rows]).result()
        expected_norm = ours.optim_step(rs.AdamParams(learning_rate=3e-3)).result().metrics["grad_norm:max"]
    assert len(output.loss_fn_outputs) == 2500
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    assert norm == pytest.approx(expected_norm, rel=1e-4)
    for index in (0, 1023, 1024, 2499):
        theirs = output.loss_fn_outputs[index]["logprobs"].to_numpy()
        assert np.allclose(theirs, expected.loss_fn_outputs[index]["logprobs"].to_numpy(), atol=1e-5)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro"])
def test_each_loss_goes_through(training, loss_fn):
    inputs = {
        "target_tokens": types.TensorData.from_numpy(np.array(TOKENS[1:])),
        "logprobs": types.TensorData.from_numpy(np.full(19, -2.0, np.float32)),
        "advantages": types.TensorData.from_numpy(np.linspace(-1, 1, 19).astype(np.float32)),
    }
    given = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    output = training.forward_backward([given], loss_fn).result()
    assert np.isfinite(output.metrics["loss:sum"])
    training.optim_step(types.AdamParams(learning_rate=0.0)).result()


def test_a_loss_of_the_callers_own(training):
    def loss(data, logprobs):
        return -sum(one.sum() for one in logprobs), {"mine:sum": 2.0}

    own = training.forward_backward_custom([datum()], loss).result()
    expected = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm:max"]
    training.forward_backward([datum()], "cross_entropy").result()
    assert training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm:max"] == pytest.approx(expected)
    assert own.metrics["mine:sum"] == 2.0


def test_an_operation_that_is_refused_fails_alone(training):
    bad = training.forward_backward([datum([5, 6, 10**6])], "cross_entropy")
    good = training.forward_backward([datum()], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=0.0))
    with pytest.raises(tinker.RequestFailedError, match="data\\[0\\]"):
        bad.result()
    assert np.isfinite(good.result().metrics["loss:sum"])
    step.result()
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        training.optim_step(ADAM).result()
    with pytest.raises(tinker.RequestFailedError, match="unheard_of"):
        training.forward_backward([datum()], "unheard_of").result()
    image = types.Datum(
        model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]),
        loss_fn_inputs={"target_tokens": [1], "weights": [1.0]},
    )
    for refused, why in (
        (training.forward_backward([image], "cross_entropy"), "only tokens"),
        (training.load_state("tinker://nobody/weights/v1"), "no version"),
        (training.load_state("tinker://nonsense"), "not a saved version"),
        (training.save_weights_external("outside"), "Not supported"),
        (training.forward_backward([datum()], "ppo", {"unheard_of": 1.0}), "unheard_of"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=why):
            refused.result()
    assert np.isfinite(training.forward([datum()], "cross_entropy").result().metrics["loss:sum"])


def test_a_number_stands_for_one_request(gateway, client):
    training = client.create_lora_training_client(gateway.base_model, **LORA).result()
    loss = training.forward([datum()], "cross_entropy").result().metrics["loss:sum"]
    headers = {"X-API-Key": gateway.key}

    def post(route: str, **body) -> httpx.Response:
        return httpx.post(f"{gateway.url}/api/v1/{route}", json=body, headers=headers, timeout=60)

    other = post("optim_step", model_id=training.model_id, seq_id=1, adam_params={"learning_rate": 1.0})
    assert (other.status_code, "used once" in other.text) == (400, True)
    assert training.forward([datum()], "cross_entropy").result().metrics["loss:sum"] == loss
    sampler = training.save_weights_and_get_sampling_client().result()
    ask = {"sampling_session_id": sampler._sampling_session_id, "seq_id": 10**6, "sampling_params": {"max_tokens": 1}}
    chunk = {"type": "encoded_text", "tokens": [5, 6]}
    first = post("asample", prompt={"chunks": [chunk]}, **ask)
    assert post("asample", prompt={"chunks": [chunk]}, **ask).json() == first.json()
    assert post("asample", prompt={"chunks": [chunk, chunk]}, **ask).status_code == 400
    for num_samples in (0, -1, 10**9):
        asked = post("asample", prompt={"chunks": [chunk]}, num_samples=num_samples, **{**ask, "seq_id": 10**6 + 1})
        assert asked.status_code == 400
    assert post("retrieve_future", request_id="nobody").status_code == 410


def test_seeds_and_stops_mean_what_they_do_at_tinker(client, gateway):
    sampler = client.create_sampling_client(base_model=gateway.base_model).result()

    def sample(num_samples: int = 1, **params):
        asked = types.SamplingParams(**{"max_tokens": 12, "stop": [], **params})
        return [list(one.tokens) for one in sampler.sample(prompt(), num_samples, asked).result().sequences]

    assert sample(3, seed=1) == sample(3, seed=1)
    assert len({tuple(tokens) for tokens in sample(3, seed=1)}) == 3
    assert sample(seed=1) != sample(seed=2)
    (free,) = sample(temperature=0)
    stopped = (
        sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=12, temperature=0, stop=[free[3]])).result().sequences[0]
    )
    cut = free.index(free[3]) + 1
    assert (list(stopped.tokens), stopped.stop_reason) == (free[:cut], "stop")
    plain = sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=2, stop=[])).result()
    assert (plain.prompt_logprobs, plain.topk_prompt_logprobs) == (None, None)
    assert plain.sequences[0].stop_reason == "length"


def test_a_version_is_pinned_and_is_known_by_its_path(client, gateway, training):
    path = training.save_weights_for_sampler("pinned").result().path
    assert path.startswith(f"tinker://{training.model_id}/sampler_weights/")
    pinned = client.create_sampling_client(model_path=path)
    assert pinned.get_base_model() == gateway.base_model
    before = pinned.compute_logprobs(prompt(TOKENS)).result()
    training.forward_backward([datum()], "cross_entropy")
    training.optim_step(ADAM).result()
    newer = training.save_weights_and_get_sampling_client()
    assert pinned.compute_logprobs(prompt(TOKENS)).result() == before
    assert newer.compute_logprobs(prompt(TOKENS)).result() != before
    base = client.create_sampling_client(base_model=gateway.base_model)
    assert len(base.sample(prompt(), 1, greedy()).result().sequences[0].tokens) <= 5
    topk = pinned.sample(prompt(TOKENS[:4]), 1, greedy(1), include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    assert [len(row) for row in topk.topk_prompt_logprobs[1:]] == [3, 3, 3]


def test_lost_repeated_and_reordered_requests_change_nothing(client, gateway):
    expected = run(client, gateway.base_model)
    proxy = FaultyProxy(gateway.url, seed=0)
    with served(proxy) as url, tinker.ServiceClient(base_url=url, api_key=gateway.key) as faulty:
        before = gateway.service.usage().total
        assert run(faulty, gateway.base_model) == expected
        used = gateway.service.usage().total
    assert min(proxy.faults[fault] for fault in ("lost", "answer lost", "twice")) >= 2
    assert used.sampled_tokens - before.sampled_tokens == sum(map(len, expected["samples"]))
    assert used.optim_steps - before.optim_steps == 6


def test_another_version_of_the_package_gets_the_same(client, gateway):
    folder = Path(sys.prefix) / "tinker-oldest"
    script = Path(__file__).with_name("tinker_runs.py")
    done = subprocess.run(
        [sys.executable, str(script), gateway.url, gateway.key, gateway.base_model],
        env={**os.environ, "PYTHONPATH": str(folder), "TINKER_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.pop("version") != tinker.__version__
    assert said == run(client, gateway.base_model)
