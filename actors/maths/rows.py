"""Rows: datums packed into one pass of the model, with a shared prompt computed once.

The samples of one prompt differ only in their answers. Where datums begin with the same tokens, those tokens stand in the
row once, and each rest attends to them: the same logprobs and, by the chain rule, the same summed gradient, for a fraction
of the tokens (a group of 8 answers of 13 tokens to a prompt of 37 goes through as 141 tokens instead of 400).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raysessions.batch import Batch

MIN_SHARED_TOKENS = 16
"""A shorter common beginning is not worth a segment of its own."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens in a row that attend to each other causally."""

    begin: int
    end: int
    prefix: tuple[int, int] | None = None
    """The run before them in the row that they also see whole; None when the segment begins its sequence."""


@dataclass(frozen=True, slots=True)
class Row:
    """One micro-batch."""

    indices: list[int]
    """Its datums in the batch."""
    tokens: np.ndarray
    """int64, shape (num_unique,): what goes through the model."""
    position_ids: np.ndarray
    """int64, shape (num_unique,): each token's place in its sequence."""
    segments: list[Segment]
    source: np.ndarray
    """int64, shape (num_tokens,): for the tokens of its datums, end to end, where each stands in the row."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Datums that begin with the same `num_shared` tokens."""

    indices: list[int]
    num_shared: int
    num_unique: int


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a batch."""

    rows: list[Row]
    num_passes: int
    """Rows of the rank that has most."""


def plan_rows(batch: Batch, max_tokens: int) -> list[Row]:
    """Packs all datums into rows of at most `max_tokens` unique tokens; a longer datum gets a row of its own.

    First fit, longest first: within 22 % of the fewest rows (Johnson 1973). The same batch gives the same plan.
    """
    return plan_share(batch, max_tokens, 0, 1).rows


def plan_share(batch: Batch, max_tokens: int, world_rank: int, world_size: int) -> Share:
    """The rows of one rank: every datum goes to one of them, and each gets about as many unique tokens, or none.

    Every rank plans the whole batch in the same way, so they need not talk.
    """
    families = _families(batch)
    share = -(-sum(family.num_unique for family in families) // world_size)
    parts = [part for family in families for part in _split(batch, family, _limit(family, max_tokens, share, world_size))]
    parts.sort(key=lambda family: (-family.num_unique, family.indices[0]))
    ranks: list[list[_Family]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for part in parts:  # the longest to the rank with least: within a third of the best (Graham 1969)
        rank = loads.index(min(loads))
        ranks[rank].append(part)
        loads[rank] += part.num_unique
    bins = [_fill(families, max_tokens) for families in ranks]
    return Share([_row(batch, families) for families in bins[world_rank]], max(map(len, bins)))


def empty_row() -> Row:
    """One token that belongs to no datum."""
    return Row([], np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), [Segment(0, 1)], np.zeros(1, dtype=np.int64))


def _limit(family: _Family, max_tokens: int, share: int, world_size: int) -> int:
    """How many tokens of a family may stay together: a row's, and with several ranks about a rank's share, where each part
    brings the shared beginning again."""
    if world_size == 1:
        return max_tokens
    own = -(-(family.num_unique - family.num_shared) // world_size)
    return min(max_tokens, max(share, family.num_shared + own))


def _fill(families: list[_Family], max_tokens: int) -> list[list[_Family]]:
    """Rows of families, given longest first: each goes where it first fits."""
    bins: list[list[_Family]] = []
    room: list[int] = []
    for family in families:
        slot = next((slot for slot, free in enumerate(room) if free >= family.num_unique), None)
        if slot is None:
            bins.append([])
            room.append(max_tokens)
            slot = len(bins) - 1
        bins[slot].append(family)
        room[slot] -= family.num_unique
    return bins


def _families(batch: Batch) -> list[_Family]:
    """Groups datums by common beginning so that the fewest tokens remain.

    Sorted by their tokens, datums that share most are neighbours, so a family is a run of them. It shares the least that any
    two neighbours in it share, and saves that for each member but one; the best cut into runs is found by dynamic
    programming over where the last run begins.
    """
    sequences = [batch.tokens[begin:end] for begin, end in itertools.pairwise(batch.offsets)]
    order = sorted(range(batch.num_datums), key=lambda i: (sequences[i].astype(">i8").tobytes(), i))
    shared = np.zeros(len(order), dtype=np.int64)  # of the run from each begin to the end at hand
    saved = np.zeros(len(order) + 1, dtype=np.int64)  # the most that the first so many datums can save
    begins = np.zeros(len(order) + 1, dtype=np.int64)
    shared_at = np.zeros(len(order) + 1, dtype=np.int64)
    for end in range(1, len(order) + 1):
        last = end - 1
        if last:
            common = _common_length(sequences[order[last - 1]], sequences[order[last]])
            np.minimum(shared[:last], common if common >= MIN_SHARED_TOKENS else 0, out=shared[:last])
        shared[last] = len(sequences[order[last]])
        total = saved[:end] + shared[:end] * np.arange(last, -1, -1)
        begin = last - int(np.argmax(total[::-1]))  # of equally good cuts the shortest run
        saved[end], begins[end], shared_at[end] = total[begin], begin, shared[begin]
    families = []
    end = len(order)
    while end:
        begin = int(begins[end])
        families.append(_family(batch, order[begin:end], int(shared_at[end]) if end - begin > 1 else 0))
        end = begin
    return families


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Leading tokens that are equal, less than either length: each datum keeps a token of its own."""
    limit = min(len(a), len(b)) - 1
    different = np.flatnonzero(a[:limit] != b[:limit])
    return int(different[0]) if len(different) else limit


def _family(batch: Batch, indices: Sequence[int], num_shared: int) -> _Family:
    num_unique = num_shared + sum(int(batch.lengths[i]) - num_shared for i in indices)
    return _Family(sorted(indices), num_shared, num_unique)


def _split(batch: Batch, family: _Family, max_tokens: int) -> list[_Family]:
    """The family in parts that fit into a row, each with the shared beginning again."""
    parts: list[list[int]] = []
    room = 0
    for index in family.indices:
        own = int(batch.lengths[index]) - family.num_shared
        if not parts or own > room:
            parts.append([])
            room = max_tokens - family.num_shared
        parts[-1].append(index)
        room -= own
    return [_family(batch, part, family.num_shared if len(part) > 1 else 0) for part in parts]


def _row(batch: Batch, families: list[_Family]) -> Row:
    tokens: list[np.ndarray] = []
    position_ids: list[np.ndarray] = []
    segments: list[Segment] = []
    sources: dict[int, np.ndarray] = {}
    end = 0

    def lay(index: int, first: int, last: int, prefix: tuple[int, int] | None) -> tuple[int, int]:
        """Puts tokens first…last of a datum at the row's end; returns where they stand."""
        nonlocal end
        offset = int(batch.offsets[index])
        tokens.append(batch.tokens[offset + first : offset + last])
        position_ids.append(np.arange(first, last))
        begin, end = end, end + last - first
        segments.append(Segment(begin, end, prefix))
        return begin, end

    for family in families:
        shared = family.num_shared
        prefix = lay(family.indices[0], 0, shared, None) if shared else None
        for index in family.indices:
            own = lay(index, shared, int(batch.lengths[index]), prefix)
            sources[index] = np.concatenate([np.arange(*(prefix or (0, 0))), np.arange(*own)])
    indices = sorted(sources)
    return Row(
        indices=indices,
        tokens=np.concatenate(tokens),
        position_ids=np.concatenate(position_ids),
        segments=segments,
        source=np.concatenate([sources[index] for index in indices]),
    )
