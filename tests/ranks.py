"""Training ranks as plain processes, without Ray: what they compute is compared with one rank of stage 0."""

from __future__ import annotations

import hashlib
import multiprocessing
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from datums import VOCAB, group, loss, supervised

from raysessions import LOSSES, AdamParams, Datum, TrainingConfig
from raysessions.actors.maths.metrics import Part, merge
from raysessions.actors.protocol import Seat
from raysessions.batch import Batch, pack
from raysessions.config import LoraConfig

STAGES = (0, 1, 2, 3)
TIMEOUT_S = 300


def run_ranks(world_size: int, scenario: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs `scenario(seat, *args)` on each rank and returns what each returned."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    seats = [Seat(rank, world_size, rank, world_size, "127.0.0.1", port) for rank in range(world_size)]
    with ProcessPoolExecutor(world_size, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(scenario, seat, *args) for seat in seats]
        return [future.result(timeout=TIMEOUT_S) for future in futures]


def make_engine(seat: Seat, model: Path, **config: Any):  # type: ignore[no-untyped-def]
    from raysessions.actors.engines.deepspeed import DeepSpeedEngine

    torch.set_num_threads(2 // seat.world_size)
    return DeepSpeedEngine(model, TrainingConfig(num_workers=seat.world_size, **config), seat)


def every_stage(seat: Seat, model: Path) -> dict[int, dict[str, Any]]:
    """What the conformance lines ask about, for each ZeRO stage."""
    measured = {}
    for stage in STAGES:
        settings = {"zero_stage": stage, "max_tokens_per_micro_batch": 200}
        measured[stage] = measure(make_engine(seat, model, **settings))
        measured[stage] |= checkpoint(make_engine(seat, model, gradient_checkpointing=True, **settings))
    return measured


def checkpoint(engine: Any) -> dict[str, Any]:
    """With activation checkpointing: the least of the B's largest gradients at first, and a gradient to compare."""
    data = supervised((5, 120, 1)) + supervised((300, 33, 64), seed=1)
    engine.add_session("s", LoraConfig(rank=8, alpha=16, seed=3))
    first = gradient(engine, "s", data)
    least = min(first[begin:end].abs().max().item() for name, begin, end in spans(engine, "s") if "lora_B" in name)
    randomise(engine, "s")
    return {"checkpointed": gradient(engine, "s", data), "least B": least}


def spans(engine: Any, session_id: str) -> list[tuple[str, int, int]]:
    """Name, begin and end of each parameter in an adapter's flat buffers."""
    found, end = [], 0
    for name, parameter in engine._adapters[session_id]._parameters:
        found.append((name, end, end := end + parameter.numel()))
    return found


def measure(engine: Any) -> dict[str, Any]:
    """A few training histories on one engine. Every rank must run it."""
    engine.add_session("s", LoraConfig(rank=8, alpha=16, seed=3))
    randomise(engine, "s")
    a, b = supervised((5, 120, 1)), supervised((300, 33, 64), seed=1)
    policy = group(40, (5, 9, 30, 1, 7, 7, 2, 12)) + group(25, (3, 60), seed=2)
    before = base_digest(engine)
    measured = {
        "together": gradient(engine, "s", a + b),
        "two calls": gradient(engine, "s", a, b),
        "one call each": gradient(engine, "s", *([datum] for datum in a + b)),
        "five datums": gradient(engine, "s", supervised((1, 300, 17, 150, 40))),
        "one datum": gradient(engine, "s", supervised((50,))),
        **{name: gradient(engine, "s", policy, loss_fn=name) for name in ("importance_sampling", "ppo", "gspo")},
        "logprobs": logprobs(engine, "s", supervised((1, 300, 17, 150, 40))),
        "metrics": metrics(engine, "s", policy, "ppo"),
        "steps": train(engine, "s"),
    }
    engine.remove_session("s")
    measured["alone"] = {name: interleave(engine, [name]) for name in SESSIONS}
    measured["interleaved"] = interleave(engine, list(SESSIONS))
    measured["base unchanged"] = base_digest(engine) == before
    return measured


SESSIONS = {
    "wide": LoraConfig(rank=8, alpha=16, seed=3),
    "narrow": LoraConfig(rank=3, alpha=32, seed=4, train_mlp=False),
}


def interleave(engine: Any, names: list[str]) -> dict[str, torch.Tensor]:
    """fb₁ fb₂ opt₁ fb₁ opt₂ fb₂ opt₁ opt₂, or those of them that are of the sessions `names`. Returns their weights."""
    for name in names:
        engine.add_session(name, SESSIONS[name])
        randomise(engine, name)
    history = [("wide", 1), ("narrow", 2), ("wide", 0), ("wide", 3), ("narrow", 0), ("narrow", 4), ("wide", 0), ("narrow", 0)]
    for name, seed in history:
        if name in names and seed:
            run(engine, name, supervised((30, 7, 110), seed=seed))
        elif name in names:
            engine.optim_step(name, AdamParams(learning_rate=1e-2))
    weights = {name: engine._adapters[name].weights[: engine._adapters[name].num_parameters].clone() for name in names}
    for name in names:
        engine.remove_session(name)
    return weights


def train(engine: Any, session_id: str) -> dict[str, Any]:
    """Three optimizer steps with settings that change; the last one clips."""
    norms = []
    settings = [
        AdamParams(learning_rate=1e-2, weight_decay=0.1),
        AdamParams(learning_rate=3e-3, beta1=0.5, beta2=0.9, eps=1e-3),
        AdamParams(learning_rate=1e-2, eps=1.0, grad_clip_norm=0.5),
    ]
    for seed, adam in enumerate(settings):
        run(engine, session_id, supervised((20, 90, 3), seed=seed))
        norms.append(engine.optim_step(session_id, adam)["grad_norm:max"])
    adapter = engine._adapters[session_id]
    return {"weights": adapter.weights[: adapter.num_parameters].clone(), "norms": norms}


def run(engine: Any, session_id: str, data: list[Datum], loss_fn: str = "cross_entropy", *, backward: bool = True) -> Any:
    return engine.run_loss(session_id, batch_of(data, loss_fn), loss(loss_fn), backward=backward)


def batch_of(data: list[Datum], loss_fn: str = "cross_entropy") -> Batch:
    return pack(data, LOSSES[loss_fn], vocab_size=VOCAB, context_length=512)


def randomise(engine: Any, session_id: str, seed: int = 5) -> None:
    """Random A and B, so that gradients of both are at work."""
    weights = engine._adapters[session_id].weights
    own = engine._adapters[session_id].num_parameters
    weights[:own] = torch.empty(own).normal_(0, 0.05, generator=torch.Generator().manual_seed(seed))


def gradient(engine: Any, session_id: str, *calls: list[Datum], loss_fn: str = "cross_entropy") -> torch.Tensor:
    """The gradient summed over the ranks after forward_backward of each of `calls`; the session is left without one."""
    for data in calls:
        run(engine, session_id, data, loss_fn)
    adapter, ranks = engine._adapters[session_id], engine._group
    adapter.has_gradient = False
    if engine._config.zero_stage < 2:
        whole = ranks.sum(adapter.gradient.clone())
    else:
        whole = torch.zeros_like(adapter.weights)
        ranks.own_slice(whole).copy_(adapter.gradient)
        ranks.gather_slices(whole)
    return whole[: adapter.num_parameters].clone()


def logprobs(engine: Any, session_id: str, data: list[Datum]) -> torch.Tensor:
    """Of all datums, in the order given, from whichever rank computed them."""
    result = run(engine, session_id, data, backward=False)
    whole = torch.zeros(sum(datum.model_input.length for datum in data))
    whole[torch.from_numpy(result.positions)] = torch.from_numpy(result.logprobs)
    return engine._group.sum(whole)


def metrics(engine: Any, session_id: str, data: list[Datum], loss_fn: str) -> list[dict[str, Part]]:
    """This rank's part."""
    parts = run(engine, session_id, data, loss_fn, backward=False).metrics
    return [{name: part for name, part in of_row.items() if "engine" not in name} for of_row in parts]


def merged(parts_of_ranks: list[list[dict[str, Part]]]) -> dict[str, float]:
    return merge(part for parts in parts_of_ranks for part in parts)


def base_digest(engine: Any) -> str:
    """Of every bit of the frozen base."""
    import deepspeed

    state = hashlib.blake2b()
    base = [parameter for name, parameter in engine._model.named_parameters() if "lora_" not in name]
    for parameter in base:
        is_partitioned = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], enabled=is_partitioned):
            state.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
