"""What SamplingParams mean, on one replica and on two. Conformance D5 to D7."""

from __future__ import annotations

import numpy as np
import pytest
from datums import VOCAB
from pools import PROMPT, train, trainer_logprobs

import raysessions as rs


@pytest.fixture
def training(training_by_replicas):
    return training_by_replicas


def test_greedy_samples_are_identical_and_the_argmax(training):
    train(training)
    sampler = training.save_weights_and_get_sampling_client()
    params = rs.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    sequences = sampler.sample(PROMPT, 50, params).result().sequences
    assert len(sequences) == 50
    assert {tuple(sequence.tokens) for sequence in sequences} == {tuple(sequences[0].tokens)}
    prompt = PROMPT.to_ints()
    for token, logprob in zip(sequences[0].tokens, sequences[0].logprobs, strict=True):
        candidates = [rs.datum_for_supervised([*prompt, other], [1.0] * (len(prompt) + 1)) for other in range(VOCAB)]
        outputs = training.forward(candidates).result().loss_fn_outputs
        last = np.array([output["logprobs"].to_numpy()[-1] for output in outputs])
        assert int(last.argmax()) == token
        assert logprob == pytest.approx(last.max(), abs=1e-4)
        prompt.append(token)


def test_a_seed_gives_sixteen_different_sequences_and_the_same_again(training):
    sampler = training.create_sampling_client()
    seeded = rs.SamplingParams(max_tokens=12, seed=7, stop=[])
    first, again = ([s.tokens for s in sampler.sample(PROMPT, 16, seeded).result().sequences] for _ in range(2))
    assert first == again
    assert len(set(map(tuple, first))) == 16
    free = rs.SamplingParams(max_tokens=12, stop=[])
    assert sampler.sample(PROMPT, 1, free).result().sequences != sampler.sample(PROMPT, 1, free).result().sequences


def test_logprobs_do_not_depend_on_temperature_or_top_p(training):
    sampler = training.save_weights_and_get_sampling_client()
    params = rs.SamplingParams(max_tokens=10, temperature=2.0, top_p=0.7, top_k=50, seed=3, stop=[])
    sequence = sampler.sample(PROMPT, 1, params).result().sequences[0]
    trainer = trainer_logprobs(training, PROMPT.to_ints() + sequence.tokens)
    np.testing.assert_allclose(sequence.logprobs, trainer[PROMPT.length - 1 :], atol=1e-4)


def test_stop_settings_end_a_sequence_where_they_say(training):
    sampler = training.create_sampling_client()
    tokenizer = sampler.get_tokenizer()
    whole = sampler.sample(PROMPT, 1, rs.SamplingParams(max_tokens=30, temperature=0.0, stop=[])).result().sequences[0]
    assert whole.stop_reason == "length"
    assert len(whole.tokens) == len(whole.logprobs) == 30
    stop_id = whole.tokens[4]
    first = whole.tokens.index(stop_id)
    by_id = sampler.sample(PROMPT, 1, rs.SamplingParams(max_tokens=30, temperature=0.0, stop=[stop_id])).result().sequences[0]
    assert by_id.tokens == whole.tokens[: first + 1]
    assert by_id.logprobs == pytest.approx(whole.logprobs[: first + 1], abs=1e-5)
    assert by_id.stop_reason == "stop"
    printable = next(t for t in whole.tokens[3:] if tokenizer.decode([t]).isprintable() and tokenizer.decode([t]).isascii())
    text = tokenizer.decode([printable])
    by_text = sampler.sample(PROMPT, 2, rs.SamplingParams(max_tokens=30, temperature=0.0, stop=text)).result().sequences
    assert by_text[0].tokens == whole.tokens[: whole.tokens.index(printable) + 1]
    assert by_text[0].stop_reason == "stop"
    assert all(len(sequence.tokens) == len(sequence.logprobs) for sequence in by_text)


def test_the_end_of_sequence_token_stops_is_included_and_can_be_disabled(training):
    eos = 2
    teach = [rs.datum_for_supervised([*PROMPT.to_ints(), 50, eos], [0.0] * PROMPT.length + [1.0, 1.0])]
    for _ in range(30):
        training.forward_backward(teach)
        training.optim_step(rs.AdamParams(learning_rate=2e-2)).result()
    sampler = training.save_weights_and_get_sampling_client()
    ends = sampler.sample(PROMPT, 1, rs.SamplingParams(max_tokens=10, temperature=0.0)).result().sequences[0]
    assert ends.tokens == [50, eos]
    assert ends.stop_reason == "stop"
    assert len(ends.logprobs) == 2
    goes_on = sampler.sample(PROMPT, 1, rs.SamplingParams(max_tokens=10, temperature=0.0, stop=[])).result().sequences[0]
    assert goes_on.tokens[:2] == [50, eos]
    assert len(goes_on.tokens) == 10


def test_prompt_logprobs_with_an_adapter_equal_the_trainers_forward(training):
    train(training)
    sampler = training.save_weights_and_get_sampling_client()
    trainer = trainer_logprobs(training, PROMPT.to_ints())
    computed = sampler.compute_logprobs(PROMPT).result()
    assert computed[0] is None
    np.testing.assert_allclose(computed[1:], trainer, atol=1e-4)
    one = rs.SamplingParams(max_tokens=1)
    response = sampler.sample(PROMPT, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    np.testing.assert_allclose(response.prompt_logprobs[1:], trainer, atol=1e-4)
    assert response.topk_prompt_logprobs[0] is None
    for own, best in zip(response.prompt_logprobs[1:], response.topk_prompt_logprobs[1:], strict=True):
        assert len(best) == 3
        assert best == sorted(best, key=lambda pair: -pair[1])
        assert own <= best[0][1] + 1e-6
