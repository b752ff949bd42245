"""Nothing is left behind: not by a killed driver, an exception, or Ctrl-C."""

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
from waiting import wait_for

import raysessions as rs

FREED_WITHIN_S = 30

DRIVER = """
import signal, sys, time
import raysessions as rs

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background has it ignored

service = rs.ServiceClient({address!r}, training=rs.TrainingConfig(num_threads=1, actor_options={{"num_cpus": 0}}))
with service.create_lora_training_client({model!r}, rank=4) as training:
    if {with_sampler}:
        training.create_sampling_client()
    print("live", flush=True)
    {action}
"""


def _start_driver(model: Path, *, address: str | None = None, with_sampler: bool = False, action: str = "time.sleep(600)"):
    code = DRIVER.format(address=address, model=str(model), with_sampler=with_sampler, action=action)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_until_live(driver: subprocess.Popen) -> None:
    assert driver.stdout is not None
    line = driver.stdout.readline()
    if line != "live\n":
        driver.kill()
        raise AssertionError(driver.communicate()[1])


def _assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=FREED_WITHIN_S)
    names = [process.name() for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert names == []


def _training_buffers() -> set[Path]:
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer*"))


def test_a_killed_driver_frees_its_local_ray_its_actors_and_vllms_processes(tiny_model):
    before = _training_buffers()
    driver = _start_driver(tiny_model, with_sampler=True)
    _wait_until_live(driver)
    descendants = psutil.Process(driver.pid).children(recursive=True)
    names_of = {process.pid: process.name() for process in descendants}
    assert "ray::TrainingActor" in names_of.values()
    replica = next(process for process in descendants if names_of[process.pid] == "ray::SamplingActor")
    engine = max(replica.children(), key=lambda child: child.memory_info().rss)  # which not every system names so
    assert engine.memory_info().rss > 2**28
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    # Ray's own two agents hold nothing, and look for their raylet now and then only.
    _assert_gone([process for process in descendants if "Agent" not in names_of[process.pid]])
    assert _training_buffers() <= before


@pytest.mark.parametrize("how", ["kill", "interrupt", "exception"])
def test_on_a_cluster_a_lost_driver_frees_its_session_and_only_that(resident, tiny_model, how):
    before, sessions = _training_actors(), _sessions(resident)
    action = "raise RuntimeError('a bug in the loop')" if how == "exception" else "time.sleep(600)"
    address = ray.get_runtime_context().gcs_address
    driver = _start_driver(tiny_model, address=address, action=action)
    _wait_until_live(driver)
    if how == "kill":
        os.kill(driver.pid, signal.SIGKILL)
    elif how == "interrupt":
        assert len(_training_actors()) == len(before) + 1
        os.kill(driver.pid, signal.SIGINT)
    driver.communicate(timeout=FREED_WITHIN_S)
    assert driver.returncode != 0
    wait_for(lambda: _training_actors() == before)
    assert _sessions(resident) == sessions
    assert resident.forward(supervised([4])).result().loss_fn_outputs


def test_ctrl_c_while_loading_frees_what_was_placed(resident, tiny_model):
    before, sessions = _training_actors(), _sessions(resident)
    driver = _start_driver(tiny_model, address=ray.get_runtime_context().gcs_address)
    assert driver.stderr is not None
    for line in driver.stderr:
        if "loading" in line:
            break
    os.kill(driver.pid, signal.SIGINT)
    driver.communicate(timeout=FREED_WITHIN_S)
    wait_for(lambda: _training_actors() == before)
    assert _sessions(resident) == sessions


def test_sessions_of_one_base_share_its_host(service, resident, tiny_model):
    before = _training_actors()
    with service.create_lora_training_client(str(tiny_model), rank=3) as training:
        assert _training_actors() == before
        data = supervised([12])
        assert training.forward(data).result().loss == pytest.approx(resident.forward(data).result().loss)
    assert _training_actors() == before


def _sessions(resident: rs.TrainingClient) -> list[str]:
    return [session.name for session in ray.get(resident._manager.list_sessions.remote(ended=False))]


def _training_actors() -> set[int]:
    return {
        process.pid for process in psutil.process_iter(["name"]) if (process.info["name"] or "").startswith("ray::TrainingA")
    }
