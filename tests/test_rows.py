"""Packing: every token of every datum stands in its row and sees its own sequence only, and shared prompts stand once."""

import numpy as np
import pytest

from raysessions.actors.maths.rows import MIN_SHARED_TOKENS, Row, plan_rows
from raysessions.batch import Batch


def batch_of(sequences: list[list[int]]) -> Batch:
    tokens = np.concatenate([np.array(sequence, dtype=np.int64) for sequence in sequences])
    offsets = np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]).astype(np.int64)
    return Batch(tokens, offsets, tokens + 1, {"weights": np.ones(len(tokens), dtype=np.float32)})


def visible_positions(row: Row) -> list[list[int]]:
    """For each token of the row, where the tokens stand that it sees, itself last."""
    seen: list[list[int]] = []
    for segment in row.segments:
        assert segment.begin == len(seen)  # the segments cover the row without a gap
        prefix = list(range(*segment.prefix)) if segment.prefix else []
        seen += [prefix + list(range(segment.begin, at + 1)) for at in range(segment.begin, segment.end)]
    return seen


def planned(sequences: list[list[int]], max_tokens: int) -> list[Row]:
    """The plan, after a look at everything that must hold of any plan."""
    rows = plan_rows(batch_of(sequences), max_tokens)
    assert sorted(index for row in rows for index in row.indices) == list(range(len(sequences)))
    for row in rows:
        assert len(row.tokens) == len(row.position_ids) == row.segments[-1].end
        assert len(row.tokens) <= max_tokens or len(row.indices) == 1
        assert len(row.tokens) <= sum(len(sequences[index]) for index in row.indices)
        visible = visible_positions(row)
        bounds = np.cumsum([len(sequences[index]) for index in row.indices])
        sources = np.split(row.source, bounds[:-1])
        assert len(row.source) == bounds[-1]
        for index, source in zip(row.indices, sources, strict=True):
            assert row.tokens[source].tolist() == sequences[index]
            assert row.position_ids[source].tolist() == list(range(len(sequences[index])))
            assert [visible[at] for at in source] == [source[: n + 1].tolist() for n in range(len(source))]
    return rows


def num_unique(rows: list[Row]) -> int:
    return sum(len(row.tokens) for row in rows)


def answers(prompt: list[int], lengths: list[int], start: int = 1000) -> list[list[int]]:
    """The prompt with answers that differ from their first token on."""
    return [prompt + [start + i] * n for i, n in enumerate(lengths)]


@pytest.mark.parametrize("max_tokens", [1, 7, 40, 64, 200, 100_000])
def test_every_token_of_random_batches_stands_in_its_row_and_sees_its_own_sequence(max_tokens: int):
    rng = np.random.default_rng(max_tokens)
    for _ in range(12):
        sequences = []
        for _ in range(rng.integers(1, 5)):
            prompt = rng.integers(0, 3, rng.integers(0, 50)).tolist()
            for _ in range(rng.integers(1, 6)):
                sequences.append(prompt + rng.integers(0, 3, rng.integers(1, 30)).tolist())
        order = rng.permutation(len(sequences))
        planned([sequences[i] for i in order], max_tokens)


def test_the_same_batch_gives_the_same_plan():
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 2, n).tolist() for n in rng.integers(1, 90, 40)]
    for first, second in zip(planned(sequences, 128), planned(sequences, 128), strict=True):
        assert first.indices == second.indices
        assert first.segments == second.segments
        for name in ("tokens", "position_ids", "source"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_the_prompt_of_a_group_of_8_stands_in_the_row_once():
    sequences = answers(list(range(37)), [13] * 8)
    rows = planned(sequences, 2048)
    assert len(rows) == 1
    assert num_unique(rows) == 37 + 8 * 13
    assert rows[0].segments[0].prefix is None
    assert [segment.prefix for segment in rows[0].segments[1:]] == [(0, 37)] * 8


def test_groups_share_whatever_the_order_of_their_datums():
    first, second = answers(list(range(40)), [5, 9, 7, 2]), answers(list(range(500, 560)), [4, 4, 30])
    mixed = [first[0], second[0], first[1], second[1], first[2], second[2], first[3]]
    rows = planned(mixed, 2048)
    assert len(rows) == 1
    assert num_unique(rows) == 40 + 5 + 9 + 7 + 2 + 60 + 4 + 4 + 30


def test_a_beginning_that_all_prompts_have_does_not_tear_the_groups_apart():
    chat_template = list(range(20))
    first, second = (chat_template + list(range(start, start + 80)) for start in (100, 500))
    rows = planned(answers(first, [6] * 4) + answers(second, [6] * 4), 2048)
    assert num_unique(rows) == 2 * (100 + 4 * 6)


def test_identical_datums_share_all_but_their_last_token():
    rows = planned([list(range(30))] * 5, 2048)
    assert num_unique(rows) == 29 + 5
    assert len(rows) == 1


def test_a_datum_that_goes_on_where_another_ends_shares_it():
    conversation = list(range(60))
    rows = planned([conversation, conversation[:40]], 2048)
    assert num_unique(rows) == 39 + 21 + 1


@pytest.mark.parametrize(("num_shared", "unique"), [(MIN_SHARED_TOKENS - 1, 2 * (15 + 4)), (MIN_SHARED_TOKENS, 16 + 2 * 4)])
def test_a_beginning_is_shared_from_16_tokens_on(num_shared: int, unique: int):
    assert MIN_SHARED_TOKENS == 16
    assert num_unique(planned(answers(list(range(num_shared)), [4, 4]), 2048)) == unique


@pytest.mark.parametrize(
    ("max_tokens", "row_sizes"),
    [(340, [340]), (200, [190, 190, 160]), (160, [160] * 4), (130, [130] * 8), (100, [130] * 8)],
)
def test_a_group_larger_than_the_budget_is_split_and_each_part_repeats_the_prompt(max_tokens: int, row_sizes: list[int]):
    # A prompt of 100 and 8 answers of 30: a row of k answers has 100 + 30 k tokens, and one answer never gets shorter.
    rows = planned(answers(list(range(100)), [30] * 8), max_tokens)
    assert [len(row.tokens) for row in rows] == row_sizes


def test_a_datum_longer_than_the_budget_has_a_row_of_its_own():
    rows = planned([[1] * 5, [2] * 300, [3] * 6], 64)
    assert [(row.indices, len(row.tokens)) for row in rows] == [([1], 300), ([0, 2], 11)]


def test_rows_are_filled_first_fit_longest_first():
    sequences = [[1] * 60, [2] * 50, [3] * 40, [4] * 30, [5] * 20]
    assert [row.indices for row in planned(sequences, 100)] == [[0, 2], [1, 3, 4]]


def test_datums_of_one_token_are_rows_too():
    rows = planned([[7], [7], [8]], 2)
    assert [(row.indices, row.tokens.tolist()) for row in rows] == [([0, 1], [7, 7]), ([2], [8])]
