"""Which replica a request goes to: the one with the least work, unless another has its prompt cached. Pure Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

BLOCK = 16
"""Tokens of a prefix block. vLLM's own are as long or longer: this is an estimate, not its cache."""
MAX_BLOCKS = 65_536
"""Blocks remembered of one replica: about a million tokens."""
REUSE_WEIGHT = 4
"""A cached prompt token is worth this many tokens of waiting: computing it again would also take cache from others. So the
samples of a group stay together while the prompt is long, and spread when it is short."""


def blocks_of(prompt: Sequence[int], adapter_id: int | None) -> tuple[int, ...]:
    """A hash for each full block of `prompt`, of all tokens up to its end: equal hashes are equal prefixes. Keys and values
    depend on the adapter, so it is part of them."""
    hashes = []
    last = hash(adapter_id)
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        last = hash((last, *prompt[end - BLOCK : end]))
        hashes.append(last)
    return tuple(hashes)


class PrefixIndex:
    """The prefixes that one replica saw last."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # so that a prefix is forgotten after what follows it
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)

    def cached_tokens(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's first tokens are probably cached."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count * BLOCK


class Loaded(Protocol):
    """What the router sees of a replica."""

    outstanding_tokens: int
    """Prompt and new tokens of the requests it has."""
    prefixes: PrefixIndex


T = TypeVar("T", bound=Loaded)


def choose(replicas: Iterable[T], blocks: Sequence[int]) -> T:
    """The replica with the least outstanding tokens, a cached prefix counted in its favour. At least one must be given."""
    return min(replicas, key=lambda replica: replica.outstanding_tokens - REUSE_WEIGHT * replica.prefixes.cached_tokens(blocks))
