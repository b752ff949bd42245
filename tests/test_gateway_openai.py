"""The unmodified openai package against a served gateway. Conformance F2; real vLLM on CPU."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from pools import teach

import raysessions as rs

MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def client(gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0)


@pytest.fixture(scope="module")
def taught(gateway):
    """A session whose version answers with one token again and again."""
    with gateway.service.create_lora_training_client(gateway.base_model, rank=4, seed=0, name="taught") as training:
        teach(training, 100)
        path = training.save_weights_for_sampler("v").result().path
        yield training, path


def test_a_session_a_version_and_the_base_model_answer_chats(client, gateway, taught):
    _, path = taught
    for model in ("taught", path, gateway.base_model):
        said = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=5, temperature=0)
        assert said.model == model
        assert said.usage.completion_tokens <= 5
        assert said.choices[0].finish_reason in ("stop", "length")


def test_completions_continue_the_very_tokens_and_say_which_were_sampled(client, taught):
    from pools import PROMPT

    training, path = taught
    said = client.completions.create(
        model=path, prompt=PROMPT.to_ints(), max_tokens=20, temperature=0, extra_body={"return_token_ids": True}
    )
    assert said.choices[0].token_ids == [100] * 20
    assert said.choices[0].prompt_token_ids == PROMPT.to_ints()
    direct = training.create_sampling_client(path).sample(PROMPT, 1, rs.SamplingParams(max_tokens=20, temperature=0)).result()
    assert direct.sequences[0].tokens == [100] * 20


def test_a_newer_version_answers_for_the_session_from_then_on(client, gateway):
    from pools import PROMPT

    with gateway.service.create_lora_training_client(gateway.base_model, rank=4, seed=0, name="moving") as training:
        for token in (100, 110):
            teach(training, token)
            training.save_weights_for_sampler(str(token)).result()
            said = client.completions.create(
                model="moving", prompt=PROMPT.to_ints(), max_tokens=20, temperature=0, extra_body={"return_token_ids": True}
            )
            assert said.choices[0].token_ids == [token] * 20


def test_streams_end_with_done_and_say_the_same(client, gateway, taught):
    arguments = {"model": "taught", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**arguments).choices[0].message.content
    stream = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **arguments)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens <= 8
    with httpx.stream(
        "POST", f"{gateway.url}/v1/chat/completions", json={"stream": True, **arguments}, headers=gateway.headers, timeout=60
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"


def test_logprobs_n_stop_and_seed_mean_what_they_do_at_openai(client, gateway):
    arguments = {"model": gateway.base_model, "messages": MESSAGES, "max_tokens": 6}
    said = client.chat.completions.create(n=3, seed=7, logprobs=True, top_logprobs=2, **arguments)
    again = client.chat.completions.create(n=3, seed=7, logprobs=True, top_logprobs=2, **arguments)
    assert len(said.choices) == 3
    assert [c.message.content for c in said.choices] == [c.message.content for c in again.choices]
    assert len({c.message.content for c in said.choices}) > 1
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in said.choices[0].logprobs.content)
    free = client.chat.completions.create(temperature=0, **arguments).choices[0]
    stop = free.message.content[1]
    cut = client.chat.completions.create(temperature=0, stop=[stop], **arguments).choices[0]
    assert cut.message.content == free.message.content.partition(stop)[0]
    assert cut.finish_reason == "stop"


def test_tools_are_offered_to_the_template_and_without_a_parser_refused(client, gateway):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    with pytest.raises(openai.BadRequestError, match="tool"):
        client.chat.completions.create(model=gateway.base_model, messages=MESSAGES, tools=tools, max_tokens=3)


def test_models_are_the_tenants_sessions_and_the_base_models(client, gateway, taught):
    names = [model.id for model in client.models.list()]
    assert "taught" in names
    assert gateway.base_model in names
    assert client.models.retrieve("taught").id == "taught"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_what_is_wrong_is_said_with_its_status(client, gateway):
    ask = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="no model 'nobody'"):
        ask(model="nobody", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(model=gateway.base_model, messages=[{"role": "user", "content": "long " * 400}])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(model=gateway.base_model, messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="messages"):
        ask(model=gateway.base_model, messages="hello")
    for headers in ({"Authorization": "Bearer tml-wrong"}, {"Authorization": "Bearer"}, {"X-API-Key": "tml-wrong"}, {}):
        answer = httpx.get(f"{gateway.url}/v1/models", headers=headers)
        assert answer.status_code == 401
        assert "keys create" in answer.json()["error"]["message"]
    answer = httpx.post(f"{gateway.url}/v1/completions", content=b"{", headers=gateway.headers)
    assert (answer.status_code, answer.headers["x-request-id"] != "") == (400, True)
    assert "Traceback" not in json.dumps(answer.json())


def test_a_key_reaches_its_tenants_models_only(gateway, taught):
    _, path = taught
    other = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.new_key("somebody-else"), max_retries=0)
    assert "taught" not in [model.id for model in other.models.list()]
    for model in ("taught", path):
        with pytest.raises(openai.NotFoundError):
            other.chat.completions.create(model=model, messages=MESSAGES)
    assert other.chat.completions.create(model=gateway.base_model, messages=MESSAGES, max_tokens=2).choices


def test_what_is_sampled_counts_for_the_tenant(gateway, client, taught):
    before = gateway.service.usage("taught").total
    client.completions.create(model="taught", prompt=[5, 6, 7], max_tokens=4, extra_body={"ignore_eos": True})
    after = gateway.service.usage("taught").total
    assert after.prefilled_tokens - before.prefilled_tokens == 3
    assert after.sampled_tokens - before.sampled_tokens == 4
    told = httpx.get(f"{gateway.url}/usage", params={"session": "taught"}, headers=gateway.headers).json()
    assert told["total"]["sampled_tokens"] == after.sampled_tokens
    others = httpx.get(f"{gateway.url}/usage", headers={"X-API-Key": gateway.new_key("somebody-else")}).json()
    assert "taught" not in [entry["session"] for entry in others["sessions"]]
