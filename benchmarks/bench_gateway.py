"""What HTTP costs: the gateway against the Ray-native client, for samples and for forward_backward.

A tiny random model, warm, so that nearly all of the time is not the model's. One replica of the gateway, the clients in this
process, all on the same machine.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import numpy as np
import tinker
from measure import report, summary
from tinker import types

import raysessions as rs
from raysessions.gateway import serving
from raysessions.gateway.config import GatewayConfig
from raysessions.gateway.keys import KeyStore
from raysessions.storage_location import StorageLocation

IN_FLIGHT, REQUESTS, ALONE, NEW_TOKENS = 256, 1024, 100, 16
PROMPT = list(range(40, 104))
TENANT = "bench"
Ask = Callable[[], Awaitable[object]]


def main() -> None:
    os.environ["TINKER_TELEMETRY"] = "0"
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from clusters import free_port
    from tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model, port, uri = str(make_tiny_model(Path(folder) / "model")), free_port(), f"{folder}/versions"
        no_cpu = {"num_cpus": 0}
        training = rs.TrainingConfig(actor_options=no_cpu)
        sampling = rs.SamplingConfig(kv_cache_gib=0.5, max_num_seqs=64, actor_options=no_cpu)
        key, _ = KeyStore(StorageLocation(uri)).create(TENANT)
        with rs.ServiceClient(tenant=TENANT, output_uri=uri, training=training, sampling=sampling) as service:
            config = GatewayConfig(
                output_uri=uri, base_models=(model,), training=training, sampling=sampling, requests_per_minute=10**6
            )
            serving.start(config, "127.0.0.1", port)
            url = f"http://127.0.0.1:{port}"
            with (
                service.create_lora_training_client(model, rank=8, name="native") as native,
                tinker.ServiceClient(base_url=url, api_key=key) as client,
            ):
                remote = client.create_lora_training_client(model, rank=8).result()
                measured = {**asyncio.run(samples(native, remote, url, key)), **steps(native, remote)}
            serving.stop()
    told(measured)


async def samples(native: rs.TrainingClient, remote: tinker.TrainingClient, url: str, key: str) -> dict[str, list[float]]:
    """Seconds of one sample alone, and of all of them with IN_FLIGHT at a time; until a stream's first token."""
    ours = await asyncio.to_thread(native.save_weights_and_get_sampling_client)
    theirs = await asyncio.to_thread(lambda: remote.save_weights_and_get_sampling_client().result())
    params = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "stop": []}
    body = {"model": "native", "prompt": PROMPT, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    connections = aiohttp.TCPConnector(limit=IN_FLIGHT)
    async with aiohttp.ClientSession(
        url, connector=connections, headers={"Authorization": f"Bearer {key}"}, raise_for_status=True
    ) as http:

        async def by_openai() -> None:
            async with http.post("/v1/completions", json=body) as answer:
                await answer.read()

        async def by_stream() -> None:
            async with http.post("/v1/completions", json={**body, "stream": True}) as answer:
                await anext(aiter(answer.content))

        prompt, their_prompt = rs.ModelInput.from_ints(PROMPT), types.ModelInput.from_ints(PROMPT)
        asks: dict[str, Ask] = {
            "native": lambda: ours.sample(prompt, 1, rs.SamplingParams(**params)),
            "tinker": lambda: theirs.sample(their_prompt, 1, types.SamplingParams(**params)),
            "openai": by_openai,
        }
        measured = {}
        for name, ask in asks.items():
            await many(ask, IN_FLIGHT)  # warm
            measured[f"{name}, alone, s"] = await alone(ask)
        for _ in range(3):
            for name, ask in asks.items():
                measured.setdefault(f"{name}, {IN_FLIGHT} in flight, s", []).append(await many(ask, REQUESTS))
        measured["openai, first streamed token, s"] = await alone(by_stream)
        measured["native, one token, s"] = await alone(lambda: ours.sample(prompt, 1, rs.SamplingParams(max_tokens=1, stop=[])))
        return measured


async def alone(ask: Ask) -> list[float]:
    times = []
    for _ in range(ALONE):
        started = time.perf_counter()
        await ask()
        times.append(time.perf_counter() - started)
    return times


async def many(ask: Ask, count: int) -> float:
    """Seconds for `count` of them, IN_FLIGHT at a time."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one() -> None:
        async with slots:
            await ask()

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return time.perf_counter() - started


def steps(native: rs.TrainingClient, remote: tinker.TrainingClient) -> dict[str, list[float]]:
    """Seconds of forward_backward with its result, in turns."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 250, 65).tolist() for _ in range(8)]
    ours = [rs.datum_for_supervised(row, [1.0] * 65) for row in rows]
    theirs = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * 64},
        )
        for row in rows
    ]
    measured: dict[str, list[float]] = {"native, forward_backward, s": [], "tinker, forward_backward, s": []}
    for repeat in range(ALONE + 10):
        for name, run in (
            ("native", lambda: native.forward_backward(ours).result()),
            ("tinker", lambda: remote.forward_backward(theirs, "cross_entropy").result()),
        ):
            started = time.perf_counter()
            run()
            if repeat >= 10:
                measured[f"{name}, forward_backward, s"].append(time.perf_counter() - started)
    return measured


def told(measured: dict[str, list[float]]) -> None:
    median = {name: float(np.median(values)) for name, values in measured.items()}
    rates = {name: REQUESTS / median[f"{name}, {IN_FLIGHT} in flight, s"] for name in ("native", "tinker", "openai")}
    report(
        "gateway",
        {name: summary(values) for name, values in measured.items()} | {"samples per second": rates},
        {
            "openai / native, samples per second": (rates["openai"] / rates["native"], 0.3),
            "tinker / native, samples per second": (rates["tinker"] / rates["native"], 0.15),
            "openai, a sample alone takes more, ms": (1e3 * (median["openai, alone, s"] - median["native, alone, s"]), -30),
            "tinker, a sample alone takes more, ms": (1e3 * (median["tinker, alone, s"] - median["native, alone, s"]), -45),
            "tinker, forward_backward takes more, ms": (
                1e3 * (median["tinker, forward_backward, s"] - median["native, forward_backward, s"]),
                -35,
            ),
            "first streamed token, ms": (1e3 * median["openai, first streamed token, s"], -60),
        },
    )


if __name__ == "__main__":
    main()
