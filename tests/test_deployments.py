"""Versions served by Ray Serve on engines of their own, with the openai package. Real vLLM on CPU."""

from __future__ import annotations

import openai
import pytest
from pools import NO_CPU, PROMPT, teach
from waiting import wait_for

import raysessions as rs

SAMPLING = rs.SamplingConfig(kv_cache_gib=0.25, max_num_seqs=4, actor_options=NO_CPU)


@pytest.fixture(scope="module")
def saved(gateway):
    """An adapter's version and a merged one, whose session has ended."""
    with gateway.service.create_lora_training_client(gateway.base_model, rank=4, seed=0) as training:
        teach(training, 100)
        adapter = training.save_weights_for_sampler("adapter").result().path
        merged = training.save_weights_for_sampler("merged", merge_weights=True).result().path
    return {"adapter": adapter, "merged": merged}


@pytest.fixture
def deployed(gateway, saved, request):
    scaling = {"min_replicas": 1, "max_replicas": 2} if request.param == "adapter" else None
    info = gateway.service.deploy(saved[request.param], request.param, autoscaling=scaling, sampling=SAMPLING, timeout_s=120)
    yield info
    gateway.service.undeploy(request.param)


def ask(client: openai.OpenAI, model: str) -> list[int]:
    said = client.completions.create(
        model=model, prompt=PROMPT.to_ints(), max_tokens=10, temperature=0, extra_body={"return_token_ids": True}
    )
    return said.choices[0].token_ids


@pytest.mark.parametrize("deployed", ["adapter", "merged"], indirect=True)
def test_a_version_is_served_after_its_session(gateway, deployed, saved):
    name = deployed.name
    assert (deployed.path, deployed.status, deployed.num_replicas) == (saved[name], "RUNNING", 1)
    assert gateway.service.list_deployments() == [deployed]
    client = openai.OpenAI(base_url=deployed.url, api_key=gateway.key, max_retries=0)
    assert ask(client, name) == ask(client, saved[name]) == [100] * 10
    assert [model.id for model in client.models.list()] == [name, saved[name]]
    stream = client.completions.create(model=name, prompt=PROMPT.to_ints(), max_tokens=5, temperature=0, stream=True)
    assert len(list(stream)) >= 5
    with pytest.raises(openai.NotFoundError):
        ask(client, gateway.base_model)
    for key, error in ((gateway.new_key("somebody-else"), openai.NotFoundError), ("tml-wrong", openai.AuthenticationError)):
        with pytest.raises(error):
            ask(openai.OpenAI(base_url=deployed.url, api_key=key, max_retries=0), name)
    long = {"model": name, "prompt": PROMPT.to_ints(), "max_tokens": 300, "extra_body": {"ignore_eos": True}}
    begun = client.completions.create(stream=True, **long)
    chunks = [next(begun)]
    gateway.service.undeploy(name)
    chunks += begun  # what was under way is answered
    assert chunks[-1].choices[0].finish_reason == "length"
    gateway.service.undeploy(name)
    wait_for(lambda: gateway.service.list_deployments() == [])
    with pytest.raises(openai.APIStatusError):
        ask(client, name)


def test_what_cannot_be_deployed_is_told_and_leaves_nothing(gateway, saved):
    deploy = gateway.service.deploy
    with pytest.raises(rs.CheckpointNotFoundError):
        deploy("raysessions://default/v9999", "absent")
    with pytest.raises(rs.ConfigError, match="not both"):
        deploy(saved["adapter"], "both", 2, autoscaling={"max_replicas": 3})
    with pytest.raises(rs.ConfigError, match="Deployment name"):
        deploy(saved["adapter"], "No/Name")
    greedy = SAMPLING.model_copy(update={"actor_options": {"num_cpus": 1000}})
    with pytest.raises(rs.PlacementError, match="actor_options"):
        deploy(saved["adapter"], "too-large", sampling=greedy, timeout_s=5)
    wait_for(lambda: gateway.service.list_deployments() == [])
    with gateway.service.create_lora_training_client(gateway.base_model, rank=4, seed=0) as training:
        state = training.save_state("state").result().path
    with pytest.raises(rs.ConfigError, match="training state"):
        deploy(state, "state")
