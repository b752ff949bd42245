"""Callers who mean harm: nonsense, far too much, no key. Nothing breaks, nobody else waits, memory stays bounded."""

from __future__ import annotations

import json
import random
import resource
import socket
import time

import httpx
import pytest
from gateways import gateway_process
from test_tinker_wire import request_of, tensor
from tinker import types

MIB = 2**20
SDK_ROUTES = (
    "create_session",
    "session_heartbeat",
    "create_model",
    "get_info",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
    "create_sampling_session",
    "join_sampling_session",
    "asample",
    "retrieve_future",
    "cancel_future",
    "weights_info",
)
ROUTES = [*(f"/api/v1/{route}" for route in SDK_ROUTES), "/v1/chat/completions", "/v1/completions"]
WORDS = [
    "model",
    "model_id",
    "seq_id",
    "session_id",
    "messages",
    "prompt",
    "path",
    "request_id",
    "sampling_params",
    "tags",
    "n",
]


@pytest.fixture(scope="module", autouse=True)
def memory_stays_bounded(gateway):
    httpx.get(f"{gateway.url}/v1/models", headers=gateway.headers)
    before = gateway_process().memory_info().rss
    yield
    assert gateway_process().memory_info().rss - before < 400 * MIB


@pytest.fixture(scope="module")
def http(gateway):
    with httpx.Client(base_url=gateway.url, headers=gateway.headers, timeout=60) as http:
        yield http


def nonsense(rng: random.Random, depth: int = 0):
    """Some JSON."""
    kinds = [None, True, -1, 2**70, 1e308, "", "\x00", "💥" * 50, "tinker://x/weights/v1", "../../etc/passwd"]
    kind = rng.randrange(8)
    if depth < 3 and kind < 2:
        return [nonsense(rng, depth + 1) for _ in range(rng.randrange(4))]
    if depth < 3 and kind < 5:
        return {rng.choice(WORDS): nonsense(rng, depth + 1) for _ in range(rng.randrange(5))}
    return rng.choice(kinds)


def test_nonsense_is_refused_in_a_sentence(http):
    rng = random.Random(0)
    for _ in range(400):
        route = rng.choice(ROUTES)
        body = rng.choice([json.dumps(nonsense(rng)).encode(), rng.randbytes(rng.randrange(200)), b"[" * 100_000, b"{}"])
        answer = http.post(route, content=body)
        assert answer.status_code < 500 or answer.status_code == 504, (route, body, answer.text)
        assert "Traceback" not in answer.text
        assert 'File "' not in answer.text


def test_protobuf_with_bytes_changed_is_refused_or_is_another_request(http):
    rng = random.Random(0)
    inputs = {"target_tokens": tensor([6, 7, 8], "int64"), "advantages": tensor([0.5, -1, 2], "float32")}
    message = request_of(types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=inputs))
    for _ in range(300):
        changed = bytearray(message)
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        answer = http.post("/api/v1/forward_backward", content=bytes(changed[: rng.randrange(1, len(changed) + 1)]))
        assert answer.status_code in (400, 410), answer.text


def test_prompts_of_10_mb_are_refused_and_hold_nobody_up(http, gateway):
    text, started = "word " * (2 * MIB), time.monotonic()
    body = {"model": gateway.base_model, "max_tokens": 1}
    for route, prompt in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": [5] * (2 * MIB)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        answer = http.post(route, json={**body, **prompt})
        assert answer.status_code == 400, answer.text[:500]
        assert len(answer.text) < 10_000
        small = {"model": gateway.base_model, "prompt": [5, 6, 7], "max_tokens": 1}
        assert http.post("/v1/completions", json=small).status_code == 200
    session = http.post("/api/v1/create_session", json={"tags": [], "user_metadata": None, "sdk_version": "1"}).json()
    made = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": gateway.base_model}
    sampler = http.post("/api/v1/create_sampling_session", json=made).json()["sampling_session_id"]
    chunks = [{"type": "encoded_text", "tokens": [5] * (2 * MIB)}]
    ask = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": chunks}, "sampling_params": {}}
    future = http.post("/api/v1/asample", json=ask).json()
    failed = http.post("/api/v1/retrieve_future", json={"request_id": future["request_id"]}).json()
    assert (failed["category"], "context" in failed["error"]) == ("user", True)
    assert time.monotonic() - started < 60


def test_a_thousand_idle_connections_keep_nobody_out(gateway, http):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 4096), limits[1]))
    address = ("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    idle = []
    try:
        for index in range(1000):
            idle.append(socket.create_connection(address, timeout=10))
            if index % 2:  # half a request
                idle[-1].send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
        started = time.monotonic()
        assert httpx.get(f"{gateway.url}/v1/models", headers=gateway.headers, timeout=30).status_code == 200
        assert time.monotonic() - started < 5
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_wrong_keys_get_nothing(gateway):
    rng = random.Random(0)
    with httpx.Client(base_url=gateway.url) as http:
        for _ in range(200):
            key = rng.choice(["", "tml-" + rng.randbytes(24).hex(), "x" * 4000, "../keys", gateway.key[:-1], gateway.key + "x"])
            answer = http.post(rng.choice(ROUTES), json={}, headers={"X-API-Key": key})
            assert answer.status_code == 401
        assert http.get("/healthz").json() == {"status": "ok"}


def test_after_all_that_it_samples(http, gateway):
    small = {"model": gateway.base_model, "prompt": [5, 6, 7], "max_tokens": 1}
    assert http.post("/v1/completions", json=small).status_code == 200
