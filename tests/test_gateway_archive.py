"""What the tinker package asks about: sessions, training runs, versions; whose they are, and when they end. Conformance F4."""

from __future__ import annotations

import time

import httpx
import pytest
import tinker
from tinker import types
from tinker_runs import LORA, TOKENS, datum
from waiting import wait_for


@pytest.fixture(scope="module")
def client(gateway, sdk):
    with tinker.ServiceClient(base_url=gateway.url, api_key=gateway.key) as client:
        yield client


@pytest.fixture(scope="module")
def training(client, gateway):
    return client.create_lora_training_client(gateway.base_model, user_metadata={"purpose": "archive"}, **LORA)


@pytest.fixture(scope="module")
def saved(training):
    """A state's path and a sampler's."""
    return training.save_state("first").result().path, training.save_weights_for_sampler("second").result().path


@pytest.fixture(scope="module")
def stranger(gateway, sdk):
    with tinker.ServiceClient(base_url=gateway.url, api_key=gateway.new_key("stranger")) as client:
        yield client


def test_runs_and_versions_are_listed(client, training, saved, gateway):
    rest = client.create_rest_client()
    run = rest.get_training_run(training.model_id).result()
    assert (run.base_model, run.lora_rank, run.is_lora) == (gateway.base_model, 8, True)
    assert (run.last_checkpoint.tinker_path, run.last_sampler_checkpoint.tinker_path) == saved
    assert rest.get_training_run_by_tinker_path(saved[0]).result().training_run_id == training.model_id
    assert training.model_id in [one.training_run_id for one in rest.list_training_runs().result().training_runs]
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert {one.tinker_path: one.checkpoint_type for one in listed} == {saved[0]: "training", saved[1]: "sampler"}
    assert all(one.size_bytes > 0 and one.user_metadata["purpose"] == "archive" for one in listed)
    assert {one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints} >= set(saved)
    info = rest.get_weights_info_by_tinker_path(saved[0]).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == (gateway.base_model, 8, True)


def test_versions_are_deleted_and_get_a_time_to_live(client, training):
    rest = client.create_rest_client()
    path = training.save_state("short").result().path
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    (one,) = (one for one in rest.list_checkpoints(training.model_id).result().checkpoints if one.tinker_path == path)
    assert 3500 < one.expires_at.timestamp() - time.time() <= 3600
    with pytest.raises(tinker.NotFoundError, match="no version"):
        rest.delete_checkpoint_from_tinker_path(path.replace("/weights/", "/sampler_weights/")).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in [one.tinker_path for one in rest.list_checkpoints(training.model_id).result().checkpoints]
    with pytest.raises(tinker.NotFoundError, match="no version"):
        client.create_training_client_from_state(path).get_info()


def test_sessions_and_samplers_are_listed(client, training, saved):
    rest = client.create_rest_client()
    session_id = training.model_id.partition(":")[0]
    assert session_id in rest.list_sessions().result().sessions
    base_model = client.create_sampling_client(model_path=saved[1]).get_base_model()
    session = rest.get_session(session_id).result()
    assert training.model_id in session.training_run_ids
    found = rest.get_sampler(session.sampler_ids[-1]).result()
    assert found.model_path == saved[1]
    assert base_model == found.base_model


def test_capabilities_name_the_models(client, gateway):
    (model,) = (one for one in client.get_server_capabilities().supported_models if one.model_name == gateway.base_model)
    assert model.max_context_length == 512


def test_a_key_reaches_its_own_tenant_only(stranger, saved, training, gateway):
    rest = stranger.create_rest_client()
    assert rest.list_training_runs().result().training_runs == []
    assert rest.list_user_checkpoints().result().checkpoints == []
    session_id = training.model_id.partition(":")[0]
    headers = {"X-API-Key": gateway.new_key("stranger")}

    def post(route: str, **body) -> httpx.Response:
        return httpx.post(f"{gateway.url}/api/v1/{route}", json=body, headers=headers, timeout=60)

    run, kind, name = saved[0].removeprefix("tinker://").split("/")
    versions = f"{gateway.url}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"
    refused = [
        post("get_info", model_id=training.model_id),
        post("optim_step", model_id=training.model_id, seq_id=1, adam_params={}, type="optim_step"),
        post("save_weights", model_id=training.model_id, seq_id=1, path="x"),
        post("session_heartbeat", session_id=session_id),
        post(f"sessions/{session_id}/finish"),
        post("retrieve_future", request_id=f"{training.model_id}:1"),
        post("weights_info", tinker_path=saved[0]),
        httpx.get(f"{gateway.url}/api/v1/training_runs/{training.model_id}", headers=headers),
        httpx.delete(versions, headers=headers),
        httpx.put(f"{versions}/ttl", json={"ttl_seconds": 1}, headers=headers),
    ]
    assert {answer.status_code for answer in refused} <= {404, 410}
    for attempt in (
        lambda: stranger.create_sampling_client(model_path=saved[1]).get_base_model(),
        lambda: stranger.create_training_client_from_state(saved[0]).get_info(),
    ):
        with pytest.raises(tinker.NotFoundError, match="no version"):
            attempt()
    assert training.get_info().model_id == training.model_id


def test_a_finished_session_frees_its_runs(gateway):
    with tinker.ServiceClient(base_url=gateway.url, api_key=gateway.key) as client:
        training = client.create_lora_training_client(gateway.base_model, **LORA)
        name = training.model_id.replace(":", "-")
        assert name in [session.name for session in gateway.service.list_sessions()]
    wait_for(lambda: name not in [session.name for session in gateway.service.list_sessions()])
    headers = {"X-API-Key": gateway.key}
    body = {"model_id": training.model_id}
    answer = httpx.post(f"{gateway.url}/api/v1/get_info", json=body, headers=headers)
    assert answer.status_code == 410
    session_id = training.model_id.partition(":")[0]
    again = httpx.post(f"{gateway.url}/api/v1/sessions/{session_id}/finish", json={}, headers=headers)
    assert again.status_code == 200  # its answer may have been lost the first time
    beat = {"session_id": session_id}
    assert httpx.post(f"{gateway.url}/api/v1/session_heartbeat", json=beat, headers=headers).status_code == 410


def test_what_is_not_supported_says_so(client, training, saved):
    rest = client.create_rest_client()
    with pytest.raises(tinker.NotFoundError, match="Not supported by raysessions"):
        rest.publish_checkpoint_from_tinker_path(saved[0]).result()
    with pytest.raises(tinker.NotFoundError, match="export_checkpoint"):
        rest.get_external_weights_urls(saved[0].replace("/weights/", "/external_weights/")).result()
    with pytest.raises(tinker.RequestFailedError, match="dimuon"):
        training.optim_step(types.DimuonParams(learning_rate=0.1)).result()
    assert len(training.forward([datum()], "cross_entropy").result().loss_fn_outputs) == 1
    sampler = client.create_sampling_client(model_path=saved[1])
    params = types.SamplingParams(max_tokens=1)
    with pytest.raises(tinker.BadRequestError, match="topk_sample_logprobs"):
        sampler.sample(types.ModelInput.from_ints(TOKENS[:3]), 1, params, topk_sample_logprobs=3).result()
