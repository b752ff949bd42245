"""The light actors die too: a host, a manager, a pool and a vault come back, and nobody's run is lost. Conformance E5."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray
from datums import supervised
from pools import NO_CPU, PROMPT, greedy, teach
from test_recovery import LONG, run
from waiting import wait_for

import raysessions as rs

TRAINING = rs.TrainingConfig(num_threads=1, actor_options=NO_CPU)


def processes(name: str) -> set[int]:
    """Of actors of that class on this machine."""
    return {p.pid for p in psutil.process_iter(["name"]) if (p.info["name"] or "").startswith(f"ray::{name}")}


class Killer:
    """Kills the process of an actor that came after this was made."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before = processes(name)

    def kill(self) -> None:
        wait_for(lambda: bool(processes(self._name) - self._before))
        (pid,) = processes(self._name) - self._before
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: pid not in processes(self._name))


def vaulted() -> set[str]:
    """Sessions of which there is a copy."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    vaults = [ray.get_actor(**actor) for actor in actors if actor["name"].startswith("raysessions-vault-")]
    return {kept.request.session_id for vault in vaults for kept in ray.get(vault.everything.remote())}


@pytest.fixture(scope="module")
def undisturbed(service, resident, tiny_model) -> list[float]:
    with service.create_lora_training_client(str(tiny_model), rank=8, seed=0, training=TRAINING) as training:
        return run(training, lengths=LONG)


@pytest.fixture
def create(service, resident, tiny_model):
    """A session with a host, ranks and a vault of its own, on the resident samplers."""
    opened = []

    def create(**arguments):
        arguments = {"rank": 8, "seed": 0, "training": TRAINING, "share": False, **arguments}
        opened.append(service.create_lora_training_client(str(tiny_model), **arguments))
        return opened[-1]

    yield create
    for training in opened:
        training.stop()


def test_a_host_and_its_vault_killed_in_mid_step_come_back_with_the_run(create, undisturbed):
    """Each once, ranks in between, and the host at the end once more: from a vault that was filled again."""
    host, vault, ranks = Killer("ModelHost"), Killer("SessionVault"), Killer("TrainingActor")
    training = create()
    losses = []
    for step, killer in enumerate([host, vault, ranks, host]):
        first = training.forward_backward(supervised(LONG, seed=2 * step))
        second = training.forward_backward(supervised((30, 3), seed=2 * step + 1))
        killer.kill()
        if killer is vault:  # until it has been filled again, another death would end the run
            wait_for(lambda: training.get_info().session_id in vaulted())
        training.optim_step(rs.AdamParams(learning_rate=1e-2))
        losses += [first.result(timeout=120).loss, second.result(timeout=120).loss]
    assert losses == undisturbed
    path = training.save_state("after").result(timeout=60).path
    assert training.load_state_with_optimizer(path).result().step == 4
    sampler = training.save_weights_and_get_sampling_client("after")
    assert sampler.sample(PROMPT, 1, greedy()).result().sequences


def test_a_gradient_outlives_its_host(create, training):
    """Operations since the last optimizer step are done again, from the vault."""
    norms = []
    killer = Killer("ModelHost")
    for session in (training, create()):
        session.forward_backward(supervised((20, 7)))
        session.optim_step(rs.AdamParams(learning_rate=1e-2)).result()
        session.forward_backward(supervised((9,), seed=1)).result()
        if session is not training:
            killer.kill()
        session.forward_backward(supervised((11,), seed=2))
        norms.append(session.optim_step().result(timeout=60).metrics["grad_norm:max"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_session_with_ranks_placed_together_comes_back_and_leaves_nothing(create):
    free = ray.available_resources().get("memory", 0)
    options = {"num_cpus": 0, "memory": 100 * 2**20}
    host = Killer("ModelHost")
    training = create(training=rs.TrainingConfig(num_workers=2, num_threads=1, actor_options=options))
    first = training.forward(supervised((20,))).result().loss
    host.kill()
    assert training.forward(supervised((20,))).result(timeout=90).loss == first
    training.stop()
    wait_for(lambda: ray.available_resources()["memory"] == pytest.approx(free))


def test_a_pool_that_is_killed_answers_with_the_right_versions(create, service, tiny_model):
    pool = Killer("SamplingPool")
    config = rs.SamplingConfig(kv_cache_gib=0.25, max_num_seqs=8, actor_options=NO_CPU)
    training = create(sampling=config)
    samplers = {}
    for token in (100, 120):
        teach(training, token)
        samplers[token] = training.save_weights_and_get_sampling_client(str(token))
    futures = [(token, sampler.sample(PROMPT, 1, greedy())) for _ in range(20) for token, sampler in samplers.items()]
    pool.kill()
    futures += [(token, sampler.sample(PROMPT, 1, greedy())) for token, sampler in samplers.items()]
    assert all(future.result(timeout=180).sequences[0].tokens == [token] * 20 for token, future in futures)
    teach(training, 140)
    newest = training.save_weights_and_get_sampling_client("140")
    assert newest.sample(PROMPT, 1, greedy()).result(timeout=60).sequences[0].tokens == [140] * 20


def test_a_manager_that_is_killed_knows_its_sessions_and_drivers_again(service, resident, create, tiny_model):
    running = create()
    sessions = [session.name for session in service.list_sessions()]
    (pid,) = {p.pid for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::SessionManager")}
    os.kill(pid, signal.SIGKILL)
    assert running.forward_backward(supervised((9,))).result().loss
    assert [session.name for session in service.list_sessions()] == sessions
    fresh = create()
    assert fresh.forward(supervised((9,))).result().loss_fn_outputs
    hosts = processes("ModelHost")
    running.stop()
    wait_for(lambda: len(processes("ModelHost")) == len(hosts) - 1)


LOST_DRIVER = """
import sys, time
import raysessions as rs

config = rs.TrainingConfig(num_threads=1, actor_options={"num_cpus": 0})
service = rs.ServiceClient(sys.argv[1], training=config)
training = service.create_lora_training_client(sys.argv[2], rank=4)
print("live", flush=True)
time.sleep(600)
"""


def test_a_driver_that_dies_with_the_manager_frees_its_session(resident, tiny_model: Path):
    before = processes("TrainingActor")
    arguments = [sys.executable, "-c", LOST_DRIVER, ray.get_runtime_context().gcs_address, str(tiny_model)]
    driver = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "live\n"
    assert len(processes("TrainingActor")) == len(before) + 1
    (manager,) = {p.pid for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::SessionManager")}
    os.kill(manager, signal.SIGKILL)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    wait_for(lambda: processes("TrainingActor") == before)
