"""The default base model: its tokenizer, its quality, and sampler against trainer in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from raysessions.models import local_folder

SENTENCES = [
    "The capital of France is Paris.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "She opened the door and walked into the garden.",
    "The train leaves the station at seven in the morning.",
    "A dog is a domesticated animal that lives with people.",
    "In 1969, humans walked on the Moon for the first time.",
    "He put the book back on the shelf and turned off the light.",
    "The sum of three and four is seven.",
    "Plants use sunlight to turn carbon dioxide into sugar.",
    "My sister plays the violin in the school orchestra.",
]

EXPECTED_NLL = 3.404
"""Nats per token, measured once in float32. The weights went through 4 bits; a broken conversion is off by nats."""


@pytest.fixture(scope="module")
def folder():
    return local_folder("smollm2-135m-instruct")


def test_digits_are_single_tokens_also_after_newlines(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("7+5\n\n5 12\n34").input_ids)
    assert tokens == ["7", "+", "5", "ĊĊ", "5", "Ġ", "1", "2", "Ċ", "3", "4"]
    assert [tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)] == list(range(32, 42))
    assert tokenizer.decode(tokenizer("a 12\n\n5 b").input_ids) == "a 12\n\n5 b"


def test_the_chat_template_wraps_turns_with_their_markers(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False)
    assert tokens[0] == 1
    assert tokens.count(2) == 2
    assert tokenizer.decode(tokens).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_mean_nll_of_ten_sentences_is_that_of_a_sound_model(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for sentence in SENTENCES:
        ids = torch.tensor([tokenizer(sentence).input_ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        losses.append(-logprobs.gather(-1, ids[0, 1:, None]).mean().item())
    assert np.mean(losses) == pytest.approx(EXPECTED_NLL, abs=0.05)
