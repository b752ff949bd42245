"""Sessions that end by themselves, outlive their driver, are counted, and pay: quota, limits, leases, attach, ledger."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from datums import supervised
from pools import PROMPT, train
from waiting import wait_for

import raysessions as rs


@pytest.fixture(autouse=True)
def no_quota(service):
    yield
    service.set_quota()


def names(service: rs.ServiceClient) -> list[str]:
    return [session.name for session in service.list_sessions()]


def test_sessions_are_listed_with_what_they_are(service, resident, tiny_model):
    with service.create_lora_training_client(str(tiny_model), rank=4, name="listed", tenant="us"):
        (listed,) = (session for session in service.list_sessions() if session.name == "listed")
        assert (listed.kind, listed.state, listed.tenant, listed.detached) == ("training", "running", "us", False)
        assert listed.base_model == str(tiny_model)
        assert 0 <= listed.idle_s <= listed.age_s < 60
        assert "resident" in names(service)
    assert "listed" not in names(service)
    (ended,) = (session for session in service.list_sessions(ended=True) if session.name == "listed")
    assert (ended.state, ended.reason) == ("stopped", "It was stopped.")


def test_more_sessions_than_the_quota_are_refused_and_the_holders_named(service, resident, tiny_model):
    with service.create_lora_training_client(str(tiny_model), rank=4, name="holder", tenant="us"):
        service.set_quota(max_sessions_per_tenant=1)
        with pytest.raises(rs.QuotaExceededError, match=r"Tenant us may have 1 .*holder \(us, training on"):
            service.create_lora_training_client(str(tiny_model), rank=4, tenant="us")
        with service.create_lora_training_client(str(tiny_model), rank=4, tenant="them") as other:
            assert other.forward(supervised((5,))).result()
        service.set_quota(max_sessions=2)
        with pytest.raises(rs.QuotaExceededError, match=r"The cluster may have 2 .*resident"):
            service.create_lora_training_client(str(tiny_model), rank=4, tenant="them")
        assert service.create_sampling_client(base_model=str(tiny_model)), "samplers are not counted"
    with service.create_lora_training_client(str(tiny_model), rank=4, tenant="us") as again:
        assert again.forward(supervised((5,))).result()
    with pytest.raises(rs.ConfigError, match="max_sessions"):
        service.set_quota(max_sessions=-1)


def test_an_idle_session_and_an_old_one_expire_and_say_why(service, resident, tiny_model):
    idle = service.create_lora_training_client(str(tiny_model), rank=4, name="idle", idle_timeout_s=3)
    old = service.create_lora_training_client(str(tiny_model), rank=4, name="old", max_lifetime_s=8)
    for _ in range(5):  # used longer than its time-out
        idle.forward(supervised((5,))).result()
        time.sleep(1)
    assert "idle" in names(service)
    wait_for(lambda: "idle" not in names(service) and "old" not in names(service))
    with pytest.raises(rs.SessionExpiredError, match=r"not used for 3 s \(idle_timeout_s\)"):
        idle.forward(supervised((5,))).result()
    with pytest.raises(rs.SessionExpiredError, match=r"lifetime of 8 s is over \(max_lifetime_s\)"):
        old.optim_step().result()
    states = {session.name: session.state for session in service.list_sessions(ended=True)}
    assert states["idle"] == states["old"] == "expired"


def test_samples_keep_a_session_from_being_idle(service, resident, tiny_model):
    with service.create_lora_training_client(str(tiny_model), rank=4, idle_timeout_s=4) as training:
        sampler = training.save_weights_and_get_sampling_client("s")
        for _ in range(8):
            sampler.sample(PROMPT, 1, rs.SamplingParams(max_tokens=2)).result()
            time.sleep(1)
        assert training.forward(supervised((5,))).result()


def test_a_session_of_this_processes_own_ray_cannot_be_detached(service, resident, tiny_model):
    with pytest.raises(rs.ConfigError, match="ray start --head"):
        service.create_lora_training_client(str(tiny_model), detached=True)
    with pytest.raises(rs.SessionStoppedError, match="no session nobody"):
        service.attach("nobody")
    with pytest.raises(rs.SessionError, match="detached=True"):
        service.attach("resident")


LEAVES_A_SESSION = """
import sys
import raysessions as rs

service = rs.ServiceClient(sys.argv[1], lease_s=float(sys.argv[3]))
training = service.create_lora_training_client(sys.argv[2], rank=4, seed=3, name=sys.argv[4], detached=True)
training.forward_backward([rs.datum_for_supervised(list(range(5, 30)), [1.0] * 25)])
training.optim_step(rs.AdamParams(learning_rate=1e-2)).result()
training.forward_backward([rs.datum_for_supervised(list(range(40, 60)), [1.0] * 20)]).result()
print(repr(training.save_state("left").result().path), flush=True)
"""


def leave_a_session(tiny_model: Path, name: str, lease_s: float = 600) -> None:
    arguments = [sys.executable, "-c", LEAVES_A_SESSION, ray.get_runtime_context().gcs_address, str(tiny_model)]
    done = subprocess.run([*arguments, str(lease_s), name], capture_output=True, text=True, timeout=90)
    assert "raysessions://" in done.stdout, done.stderr[-2000:]


def test_a_detached_session_outlives_its_driver_and_is_attached_to(service, resident, tiny_model):
    leave_a_session(tiny_model, "left-behind")
    (listed,) = (session for session in service.list_sessions() if session.name == "left-behind")
    assert listed.detached
    training = service.attach("left-behind")
    assert training.optim_step().result().metrics["step:max"] == 2, "with the gradient that was there"
    train(training)
    again = service.attach("left-behind")
    assert again.optim_step().exception() is not None
    assert again.forward(supervised((5,))).result()
    with pytest.raises(rs.SessionError, match="Another client has attached"):
        training.forward(supervised((5,))).result()
    sampler = again.save_weights_and_get_sampling_client("s")
    assert sampler.sample(PROMPT, 1, rs.SamplingParams(max_tokens=2)).result()
    service.stop_session("left-behind")
    service.stop_session("left-behind")
    with pytest.raises(rs.SessionStoppedError, match="has ended"):
        service.attach("left-behind")


def test_a_detached_session_without_clients_expires_with_its_lease(service, resident, tiny_model):
    leave_a_session(tiny_model, "leased", lease_s=6)
    training = service.attach("leased")
    time.sleep(9)  # the open client renews it
    assert "leased" in names(service)
    del training
    wait_for(lambda: "leased" not in names(service))
    with pytest.raises(rs.SessionExpiredError, match=r"renewed its lease for 6 s \(lease_s\)"):
        service.attach("leased")


def test_the_ledger_counts_what_was_used(service, resident, tiny_model, tmp_path):
    """By hand: tokens of the data and of the answers."""
    prices = rs.PriceTable(prefill=1.0, sample=2.0, train=3.0, forward=0.5)
    ours = {"tenant": "payer", "output_uri": str(tmp_path)}
    with service.create_lora_training_client(str(tiny_model), rank=4, name="first", **ours) as training:
        training.forward(supervised((5, 6))).result()
        for _ in range(2):
            training.forward_backward(supervised((10, 20, 3)))
            training.optim_step().result()
        sampler = training.save_weights_and_get_sampling_client("s")
        params = rs.SamplingParams(max_tokens=7, stop=[])
        for future in [sampler.sample(PROMPT, 3, params) for _ in range(4)]:
            future.result()
        live = training.usage()
        assert (live.forward_tokens, live.trained_tokens, live.optim_steps) == (11, 66, 2)
        assert (live.sample_requests, live.prefilled_tokens, live.sampled_tokens) == (4, 4 * PROMPT.length, 4 * 3 * 7)
        assert 0 < live.training_s < 30
    with service.create_lora_training_client(str(tiny_model), rank=4, name="second", **ours) as training:
        training.forward_backward(supervised((8,))).result()
    with rs.ServiceClient(output_uri=str(tmp_path)) as other:
        report = other.usage(tenant="payer", prices=prices)
        assert [(entry.session, entry.usage.trained_tokens) for entry in report.sessions] == [("first", 66), ("second", 8)]
        assert report.total.trained_tokens == 74
        expected = (1.0 * 120 + 2.0 * 84 + 3.0 * 74 + 0.5 * 11) / 1e6
        assert report.cost == pytest.approx(expected)
        assert sum(entry.cost for entry in report.sessions) == pytest.approx(expected)
        assert other.usage(session="second", tenant="payer").total == report.sessions[1].usage
        assert other.usage(tenant="nobody").sessions == []
        busy = [time for time in report.accelerators if time.what.startswith("training")]
        assert busy
        assert all(time.busy_s > 0 and time.idle_s > 0 for time in busy)


def test_a_session_of_the_same_name_adds_to_its_line(service, resident, tiny_model, tmp_path):
    for _ in range(2):
        with service.create_lora_training_client(
            str(tiny_model), rank=4, name="again", tenant="payer", output_uri=str(tmp_path)
        ) as training:
            training.forward_backward(supervised((8,))).result()
    with rs.ServiceClient(output_uri=str(tmp_path), tenant="payer") as other:
        assert other.usage().total.trained_tokens == 16


def test_an_estimate_adds_up(service):
    prices = rs.PriceTable(prefill=1.0, sample=2.0, train=3.0)
    cost = service.estimate(prices, steps=10, prompts_per_step=4, prompt_tokens=100, samples_per_prompt=8, sample_tokens=50)
    assert cost == pytest.approx(10 * (4 * 100 * 1.0 + 32 * 50 * 2.0 + 32 * 150 * 3.0) / 1e6)
    assert service.estimate(prices, steps=10, trained_tokens_per_step=1000) == pytest.approx(10 * 1000 * 3.0 / 1e6)


def test_a_refusal_for_want_of_room_names_who_has_it(service, resident, tiny_model):
    config = rs.TrainingConfig(placement_timeout_s=2, actor_options={"num_cpus": 1})
    with pytest.raises(rs.PlacementError, match=r"Held by: .*resident"):
        service.create_lora_training_client(str(tiny_model), training=config, share=False)


def test_capabilities_are_told(service):
    told = service.get_server_capabilities()
    assert "smollm2-135m-instruct" in told.base_models
    assert set(told.losses) == rs.LOSSES.keys()
    assert told.version == rs.__version__
