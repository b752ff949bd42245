"""Where requests go: to the least loaded replica, unless another has the prompt cached."""

from __future__ import annotations

import numpy as np

from raysessions.actors.sampling_router import BLOCK, MAX_BLOCKS, PrefixIndex, blocks_of, choose


class Replica:
    def __init__(self) -> None:
        self.outstanding_tokens = 0
        self.prefixes = PrefixIndex()
        self.prompts: list[int] = []


def send(replicas: list[Replica], prompt: list[int], new_tokens: int, adapter_id: int | None = None) -> Replica:
    """Routes a request, which stays outstanding."""
    blocks = blocks_of(prompt, adapter_id)
    replica = choose(replicas, blocks)
    replica.outstanding_tokens += len(prompt) + new_tokens
    replica.prefixes.add(blocks)
    replica.prompts.append(prompt[0])
    return replica


def test_equal_requests_spread_evenly():
    replicas = [Replica() for _ in range(4)]
    rng = np.random.default_rng(0)
    for _ in range(64):
        send(replicas, rng.integers(0, 1000, 40).tolist(), 64)
    assert [len(replica.prompts) for replica in replicas] == [16, 16, 16, 16]


def test_a_large_request_counts_for_many_small_ones():
    first, second = replicas = [Replica(), Replica()]
    send(replicas, [1] * 10, 1000)
    for i in range(10):
        send(replicas, [2 + i] * 10, 90)
    assert (len(first.prompts), len(second.prompts)) == (1, 10)


def test_samples_of_one_long_prompt_stay_together_and_groups_spread():
    replicas = [Replica() for _ in range(2)]
    rng = np.random.default_rng(0)
    for prompt in rng.integers(0, 100_000, (4, 2000)).tolist():
        homes = {id(send(replicas, prompt, 64)) for _ in range(8)}
        assert len(homes) <= 2
    assert {len(replica.prompts) for replica in replicas} == {16}


def test_a_later_turn_goes_where_the_conversation_is_cached():
    replicas = [Replica() for _ in range(4)]
    rng = np.random.default_rng(0)
    conversations = rng.integers(0, 100_000, (4, 500)).tolist()
    homes = [send(replicas, conversation, 50) for conversation in conversations]
    for conversation, home in zip(conversations, homes, strict=True):
        assert send(replicas, [*conversation, *range(70)], 50) is home


def test_a_cached_prompt_does_not_keep_a_replica_overloaded():
    replicas = [Replica() for _ in range(2)]
    for _ in range(200):
        send(replicas, [7] * 64, 64)
    assert abs(len(replicas[0].prompts) - len(replicas[1].prompts)) <= 4


def test_a_prefix_is_cached_for_its_adapter_only_and_up_to_the_first_difference():
    index = PrefixIndex()
    prompt = list(range(10 * BLOCK))
    index.add(blocks_of(prompt, 1))
    assert index.cached_tokens(blocks_of(prompt, 1)) == 10 * BLOCK
    assert index.cached_tokens(blocks_of(prompt, 2)) == 0
    assert index.cached_tokens(blocks_of(prompt, None)) == 0
    other = [*prompt[: 3 * BLOCK + 5], -1, *prompt[3 * BLOCK + 6 :]]
    assert index.cached_tokens(blocks_of(other, 1)) == 3 * BLOCK
    assert blocks_of(prompt[: BLOCK - 1], 1) == ()


def test_the_index_is_bounded_and_forgets_the_oldest():
    index = PrefixIndex()
    old = blocks_of(range(BLOCK * 10), 1)
    index.add(old)
    for start in range(0, MAX_BLOCKS, 1024):
        index.add(blocks_of(range(start, start + 1024 * BLOCK), 2))
    assert len(index._blocks) == MAX_BLOCKS
    assert index.cached_tokens(old) == 0
