"""Fifteen minutes of what goes wrong: two sessions refresh their samplers every few seconds, 64 samples are always in flight,
and every three minutes a replica is killed.

Each version is trained to answer with a token of its own, so an answer from the wrong version shows. Counted: answers from a
wrong version, requests without an answer, and whether memory, tmpfs and Ray's object store stay bounded.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from measure import report

import raysessions as rs

BASE_MODEL = "smollm2-135m-instruct"
PROMPT = rs.ModelInput.from_ints(range(1000, 1032))
ANSWER_TOKENS = 8
IN_FLIGHT = 64
REFRESH_EVERY_S = 5.0
LEARNT = -0.05
"""Logprob that every token of a version's answer must have, nats: then it is the greedy one."""
LOOK_EVERY_S = 10.0
SAMPLING = rs.SamplingConfig(
    num_replicas=2, kv_cache_gib=0.5, max_loras=2, max_live_versions=4, actor_options={"num_cpus": 0.5}
)
TRAINING = rs.TrainingConfig(actor_options={"num_cpus": 0.5})


@dataclass
class Tally:
    """What the threads count, under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: int = 0
    wrong: int = 0
    lost: list[str] = field(default_factory=list)
    refreshes: int = 0
    kills: int = 0
    slowest_s: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--kill-every-s", type=float, default=180)
    parser.add_argument("--base-model", default=BASE_MODEL)
    arguments = parser.parse_args()
    tally, stop = Tally(), threading.Event()
    with rs.ServiceClient(training=TRAINING, sampling=SAMPLING) as service:
        sessions = [service.create_lora_training_client(arguments.base_model, rank=8, seed=seed) for seed in (1, 2)]
        threads = [threading.Thread(target=_live, args=(session, i, tally, stop)) for i, session in enumerate(sessions)]
        for thread in threads:
            thread.start()
        looks = list(_watch(arguments, tally))
        stop.set()
        for thread in threads:
            thread.join()
    _report(arguments.minutes, tally, looks)


def _live(session: rs.TrainingClient, number: int, tally: Tally, stop: threading.Event) -> None:
    """Refreshes the session's samplers in turn with answering from them, half of the samples in flight."""
    tokens = itertools.cycle(range(2000 + 10_000 * number, 2200 + 10_000 * number))
    sampler, token = _teach(session, next(tokens))
    newest = [(sampler, token)]
    sampling = threading.Thread(target=_sample, args=(newest, tally, stop))
    sampling.start()
    while not stop.is_set():
        started = time.monotonic()
        newest[0] = _teach(session, next(tokens))
        with tally.lock:
            tally.refreshes += 1
        stop.wait(max(0.0, REFRESH_EVERY_S - (time.monotonic() - started)))
    sampling.join()


def _teach(session: rs.TrainingClient, token: int) -> tuple[rs.SamplingClient, int]:
    """A sampler of a version that answers PROMPT with `token`, again and again."""
    datum = rs.datum_for_supervised(
        [*PROMPT.to_ints(), *[token] * ANSWER_TOKENS], [0.0] * PROMPT.length + [1.0] * ANSWER_TOKENS
    )
    for _ in range(100):
        output = session.forward_backward([datum]).result()
        session.optim_step(rs.AdamParams(learning_rate=3e-3, grad_clip_norm=1.0))
        if output.loss_fn_outputs[0]["logprobs"].to_numpy()[-ANSWER_TOKENS:].min() > LEARNT / 2:
            break
    learnt = session.forward([datum]).result().loss_fn_outputs[0]["logprobs"].to_numpy()[-ANSWER_TOKENS:]
    if learnt.min() < LEARNT:
        raise SystemExit(f"soak: token {token} was not learnt (logprob {learnt.min():.3f}): the marker would prove nothing.")
    return session.save_weights_and_get_sampling_client(str(token)), token


def _sample(newest: list[tuple[rs.SamplingClient, int]], tally: Tally, stop: threading.Event) -> None:
    """Keeps half of IN_FLIGHT samples in flight; each comes from the version that is newest when it is sent."""
    params = rs.SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, stop=[])
    in_flight: list[tuple[rs.APIFuture[rs.SampleResponse], int, float]] = []
    while in_flight or not stop.is_set():
        while len(in_flight) < IN_FLIGHT // 2 and not stop.is_set():
            sampler, token = newest[0]
            in_flight.append((sampler.sample(PROMPT, 1, params), token, time.monotonic()))
        future, token, sent = in_flight.pop(0)
        try:
            sampled = future.result(timeout=300).sequences[0].tokens
        except rs.RaySessionsError as error:
            with tally.lock:
                tally.lost.append(f"{type(error).__name__}: {error}")
            continue
        with tally.lock:
            tally.answers += 1
            tally.wrong += sampled != [token] * ANSWER_TOKENS
            tally.slowest_s = max(tally.slowest_s, time.monotonic() - sent)


@dataclass
class Look:
    """The machine at one moment. Bytes."""

    minute: float
    replicas: int
    """Resident in the sampling actors and their engines: unique, so that shared libraries count once."""
    driver_and_rest: int
    """Resident in this process and Ray's others."""
    adapters: int
    """Adapter folders on tmpfs."""
    object_store: int


def _watch(arguments: argparse.Namespace, tally: Tally) -> Iterator[Look]:
    """Looks around and kills replicas until the time is over."""
    started = time.monotonic()
    next_kill = arguments.kill_every_s
    while (passed := time.monotonic() - started) < 60 * arguments.minutes:
        if passed >= next_kill:
            next_kill += arguments.kill_every_s
            _kill_a_replica(tally)
        look = _look(passed / 60)
        print(
            f"soak: {look.minute:5.1f} min: {tally.answers} answers, {tally.wrong} wrong, {len(tally.lost)} lost, "
            f"{tally.refreshes} refreshes, {tally.kills} kills; replicas {look.replicas / 2**20:.0f} MiB, "
            f"tmpfs {look.adapters / 2**20:.1f} MiB, object store {look.object_store / 2**20:.1f} MiB",
            flush=True,
        )
        yield look
        time.sleep(LOOK_EVERY_S)


def _replicas() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if process.name().startswith("ray::SamplingActor")]


def _kill_a_replica(tally: Tally) -> None:
    victims = _replicas()
    if victims:
        os.kill(victims[tally.kills % len(victims)].pid, signal.SIGKILL)
        tally.kills += 1


def _look(minute: float) -> Look:
    replicas = {process for actor in _replicas() for process in [actor, *actor.children(recursive=True)]}
    others = set(psutil.Process().children(recursive=True)) - replicas | {psutil.Process()}
    folders = [file for file in Path("/dev/shm").glob("raysessions-*/**/*") if file.is_file()]
    return Look(minute, _unique(replicas), _unique(others), _size(folders), _object_store_bytes())


def _unique(processes: set[psutil.Process]) -> int:
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().uss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def _size(files: list[Path]) -> int:
    total = 0
    for file in files:
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # a version has been retired meanwhile
            continue
    return total


def _object_store_bytes() -> int:
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.object_store_bytes_used


def _report(minutes: float, tally: Tally, looks: list[Look]) -> None:
    """Growth is the median of the last third over that of the first, less its first minute of loading."""
    settled = [look for look in looks if look.minute > min(1.0, minutes / 5)]
    third = max(1, len(settled) // 3)

    def growth(what: str) -> float:
        values = [getattr(look, what) for look in settled]
        return float(np.median(values[-third:]) / max(1.0, np.median(values[:third])))

    for error in sorted(set(tally.lost)):
        print(f"soak: lost: {error}")
    report(
        "soak",
        {
            "minutes": minutes,
            "answers": tally.answers,
            "refreshes": tally.refreshes,
            "kills": tally.kills,
            "slowest_answer_s": tally.slowest_s,
            "lost": tally.lost,
            "looks": [vars(look) for look in looks],
        },
        {
            "answers from a wrong version": (tally.wrong, -0.0),
            "requests lost": (len(tally.lost), -0.0),
            "growth of the replicas' memory": (growth("replicas"), -1.2),
            "growth of the other processes' memory": (growth("driver_and_rest"), -1.2),
            "growth of adapters on tmpfs": (growth("adapters"), -1.5),
            "growth of the object store": (growth("object_store"), -1.5),
        },
    )


if __name__ == "__main__":
    main()
