"""A gateway whose process dies, whose clients fall silent, or ask for too much."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest
import tinker
import uvicorn
import zstandard
from clusters import free_port
from gateways import TENANT, gateway_process
from pools import NO_CPU, TRAINING
from tinker import types
from tinker_runs import LORA, TOKENS, datum, run
from waiting import wait_for

import raysessions as rs
from raysessions.gateway.app import build_app
from raysessions.gateway.config import GatewayConfig
from raysessions.gateway.keys import KeyStore
from raysessions.storage_location import StorageLocation


@contextlib.contextmanager
def gateway_here(**config) -> Iterator[str]:
    """The same application in this process, without Ray Serve. Its address."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(build_app(GatewayConfig(**config)), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def small(gateway) -> Iterator[str]:
    """A gateway with little patience and little room."""
    sampling = rs.SamplingConfig(kv_cache_gib=0.25, max_num_seqs=16, actor_options=NO_CPU)
    with gateway_here(
        output_uri=gateway.output_uri,
        base_models=(gateway.base_model,),
        training=TRAINING,
        sampling=sampling,
        lease_s=4,
        max_body_bytes=100_000,
        requests_per_minute=100,
    ) as url:
        yield url


pytestmark = pytest.mark.usefixtures("sdk")


def poster(url: str, key: str) -> Callable[..., httpx.Response]:
    """Posts to Tinker's routes."""

    def post(route: str, **body) -> httpx.Response:
        return httpx.post(f"{url}/api/v1/{route}", json=body, headers={"X-API-Key": key}, timeout=60)

    return post


def test_a_gateway_that_is_killed_costs_time_and_not_the_run(gateway):
    with tinker.ServiceClient(base_url=gateway.url, api_key=gateway.key) as client:
        expected = run(client, gateway.base_model)
        training = client.create_lora_training_client(gateway.base_model, **LORA)
        training.get_info()
        adam, losses = types.AdamParams(learning_rate=2e-2), []
        for step in range(4):
            done = training.forward_backward([datum(), datum(TOKENS[:9])], "cross_entropy"), training.optim_step(adam)
            if step == 1:
                gateway_process().kill()
            losses.append(done[0].result().metrics["loss:sum"])
            done[1].result()
        assert losses == expected["losses"][:4]
        training.forward_backward([datum()], "cross_entropy").result()
        training.optim_step(adam).result()
        sampler = training.save_weights_and_get_sampling_client()
        gateway_process().kill()
        params = types.SamplingParams(max_tokens=8, temperature=0)
        sample = sampler.sample(types.ModelInput.from_ints(TOKENS[:5]), num_samples=1, sampling_params=params).result()
        assert list(sample.sequences[0].tokens) == expected["samples"][0]


def test_a_client_that_falls_silent_frees_its_runs(small, gateway):
    post = poster(small, gateway.new_key(TENANT))
    session_id = post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0").json()["session_id"]
    made = post("create_model", session_id=session_id, model_seq_id=0, base_model=gateway.base_model, lora_config=LORA).json()
    silent = threading.Event()

    def beat() -> None:
        while not silent.wait(1):
            post("session_heartbeat", session_id=session_id)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        assert post("retrieve_future", request_id=made["request_id"]).json() == {"model_id": f"{session_id}:train:0"}
        time.sleep(8)
        assert post("get_info", model_id=f"{session_id}:train:0").json()["lora_rank"] == 8
    finally:
        silent.set()
        beating.join()
    name = f"{session_id}-train-0"
    wait_for(lambda: name not in [session.name for session in gateway.service.list_sessions()], 30)
    told = post("session_heartbeat", session_id=session_id)
    assert (told.status_code, "no heartbeat" in told.text) == (410, True)
    asked = post("optim_step", model_id=f"{session_id}:train:0", seq_id=1, adam_params={"learning_rate": 0.1})
    gone = post("retrieve_future", request_id=asked.json()["request_id"])
    assert (gone.status_code, "expired" in gone.text or "ended" in gone.text) == (410, True)


def test_a_sample_that_nobody_waits_for_is_given_up(gateway):
    post = poster(gateway.url, gateway.key)
    session_id = post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0").json()["session_id"]
    made = post("create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model=gateway.base_model)
    ask = {
        "sampling_session_id": made.json()["sampling_session_id"],
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 480, "stop": []},
        "num_samples": 8,
    }
    before = gateway.service.usage().total.sampled_tokens
    asked = post("asample", seq_id=0, **ask).json()
    assert len(set(asked["sample_sequence_ids"])) == 8
    assert post("asample", seq_id=0, **ask).json() == asked
    assert post("cancel_future", request_id=asked["request_id"]).status_code == 200
    assert post("retrieve_future", request_id=asked["request_id"]).json()["error"] == "Cancelled."
    assert gateway.service.usage().total.sampled_tokens == before


def test_too_many_requests_are_told_when_to_come_back(small, gateway):
    headers = {"Authorization": f"Bearer {gateway.new_key('busy')}"}
    answers = [httpx.get(f"{small}/v1/models", headers=headers) for _ in range(105)]
    assert [answer.status_code for answer in answers] == [200] * 100 + [429] * 5
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    others = {"Authorization": f"Bearer {gateway.new_key('calm')}"}
    assert httpx.get(f"{small}/v1/models", headers=others).status_code == 200


def bomb_of(size: int) -> bytes:
    """Zeros, compressed."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return b"".join(compressor.compress(bytes(2**20)) for _ in range(size // 2**20)) + compressor.flush()


def test_bodies_beyond_the_bound_are_refused_before_they_are_read(small, gateway):
    headers = {"X-API-Key": gateway.new_key(TENANT)}
    url = f"{small}/api/v1/create_session"
    assert httpx.post(url, content=b" " * 100_001, headers=headers).status_code == 413

    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 65536

    with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError):  # it need not listen to the end
        assert httpx.post(url, content=endless(), headers=headers).status_code == 413
    bomb = bomb_of(2**31)
    assert len(bomb) < 100_000
    before = psutil.Process().memory_info().rss
    assert httpx.post(url, content=bomb, headers={**headers, "Content-Encoding": "zstd"}).status_code == 413
    assert psutil.Process().memory_info().rss - before < 2**29
    body = zstandard.compress(b'{"tags": [], "user_metadata": null, "sdk_version": "0.38.0"}')
    assert httpx.post(url, content=body, headers={**headers, "Content-Encoding": "zstd"}).json()["session_id"]
    compressed = zstandard.compress(bytes(50_000))
    assert httpx.post(url, content=compressed[:-4], headers={**headers, "Content-Encoding": "ZSTD"}).status_code == 400
    for encoding, status in (("zstd", 400), ("gzip", 415)):
        answer = httpx.post(url, content=b"{}", headers={**headers, "Content-Encoding": encoding})
        assert (answer.status_code, "Traceback" in answer.text) == (status, False)


def test_a_revoked_key_is_refused(small, gateway, monkeypatch):
    from raysessions.gateway import access

    monkeypatch.setattr(access, "KEPT_S", 0.0)
    store = KeyStore(StorageLocation(gateway.output_uri))
    secret, key = store.create("leaving", note="for a while")
    headers = {"Authorization": f"Bearer {secret}"}
    assert key in store.list()
    assert httpx.get(f"{small}/v1/models", headers=headers).status_code == 200
    store.revoke(key.key_id)
    assert httpx.get(f"{small}/v1/models", headers=headers).status_code == 401
    with pytest.raises(rs.ConfigError, match="keys list"):
        store.revoke(key.key_id)
