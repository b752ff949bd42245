"""One-digit addition: the smallest task on which reinforcement learning visibly works with a small model."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raysessions import ModelInput, SamplingClient, SamplingParams

NUM_HELD_OUT_PAIRS = 12
MAX_NEW_TOKENS = 14


@dataclass(frozen=True, slots=True)
class Problem:
    """What is a + b?"""

    a: int
    b: int
    prompt: ModelInput


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of right answers on the held-out problems."""

    greedy: float
    """One answer a problem, temperature 0."""
    sampled: float
    """Four answers a problem, temperature 1."""


class Arithmetic:
    """Problems split by unordered operand pair: no held-out pair, in either order, is ever trained on."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        pairs = list(itertools.combinations_with_replacement(range(10), 2))
        random.Random(seed).shuffle(pairs)
        self.held_out = [self._problem(*pair) for pair in _both_orders(pairs[:NUM_HELD_OUT_PAIRS])]
        self.train = [self._problem(*pair) for pair in _both_orders(pairs[NUM_HELD_OUT_PAIRS:])]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def is_right(self, problem: Problem, tokens: Sequence[int]) -> bool:
        """The last number in the answer is the sum."""
        numbers = re.findall(r"\d+", self.decode(tokens))
        return bool(numbers) and numbers[-1] == str(problem.a + problem.b)

    def reward(self, problem: Problem, tokens: Sequence[int]) -> float:
        """0.8 for the right sum, and 0.2 for nothing but digits, as the question asks."""
        return 0.8 * self.is_right(problem, tokens) + 0.2 * self.decode(tokens).isdigit()

    def evaluate(self, sampler: SamplingClient) -> Accuracy:
        """Asks every held-out problem once greedily and four times at temperature 1, with the same seeds each time."""
        greedy = SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=0.0)
        greedy_futures = [sampler.sample(problem.prompt, 1, greedy) for problem in self.held_out]
        sampled_futures = [
            sampler.sample(problem.prompt, 4, SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=1.0, seed=4 * number))
            for number, problem in enumerate(self.held_out)
        ]
        return Accuracy(greedy=self._share_right(greedy_futures), sampled=self._share_right(sampled_futures))

    def _share_right(self, futures: list[Any]) -> float:
        marks = [
            self.is_right(problem, sequence.tokens)
            for problem, future in zip(self.held_out, futures, strict=True)
            for sequence in future.result().sequences
        ]
        return sum(marks) / len(marks)

    def _problem(self, a: int, b: int) -> Problem:
        question = [{"role": "user", "content": f"What is {a}+{b}? Answer with just the number."}]
        tokens = self._tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        return Problem(a, b, ModelInput.from_ints(tokens))


def _both_orders(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted({order for a, b in pairs for order in ((a, b), (b, a))})
