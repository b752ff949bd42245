"""Requests that wait for a replica: fair between clients, bounded, each placed once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from raysessions import BackPressureError, SamplingParams
from raysessions.actors.sampling_queue import RequestQueue, Ticket
from raysessions.operations import SampleRequest

REQUEST = SampleRequest([1], 1, SamplingParams(), False, 0)


def ticket(client_id: str, num_tokens: int = 10) -> Ticket[str]:
    return Ticket(client_id, None, REQUEST, num_tokens, ())


def anywhere(_: Ticket[str]) -> str:
    return "replica"


def in_loop(scenario) -> None:  # type: ignore[no-untyped-def]
    async def run() -> None:
        scenario()

    asyncio.run(run())


def take(queue: RequestQueue[str], count: int) -> list[str]:
    placed = [queue.place(anywhere) for _ in range(count)]
    return [found.client_id for found in placed if found is not None]


def test_a_client_with_2000_requests_does_not_hold_up_another():
    def scenario() -> None:
        queue: RequestQueue[str] = RequestQueue(10_000)
        for _ in range(2000):
            queue.put(ticket("greedy"))
        take(queue, 500)
        for _ in range(3):
            queue.put(ticket("late"))
        assert Counter(take(queue, 6)) == {"greedy": 3, "late": 3}

    in_loop(scenario)


def test_clients_share_by_tokens_not_by_requests():
    def scenario() -> None:
        queue: RequestQueue[str] = RequestQueue(1000)
        for _ in range(200):
            queue.put(ticket("long", 100))
            queue.put(ticket("short", 10))
        tokens: Counter[str] = Counter()
        for _ in range(110):
            found = queue.place(anywhere)
            tokens[found.client_id] += found.num_tokens
        assert tokens["long"] == pytest.approx(tokens["short"], abs=100)

    in_loop(scenario)


def test_a_client_that_was_idle_has_saved_nothing_up():
    def scenario() -> None:
        queue: RequestQueue[str] = RequestQueue(1000)
        queue.put(ticket("a"))
        queue.put(ticket("b"))
        take(queue, 2)
        for _ in range(100):
            queue.put(ticket("a"))
        take(queue, 50)
        for _ in range(20):
            queue.put(ticket("b"))
        assert Counter(take(queue, 20)) == {"a": 10, "b": 10}

    in_loop(scenario)


def test_one_more_than_the_limit_is_refused_and_the_others_wait_on():
    def scenario() -> None:
        queue: RequestQueue[str] = RequestQueue(3)
        for _ in range(3):
            queue.put(ticket("a"))
        with pytest.raises(BackPressureError, match="max_queued_requests"):
            queue.put(ticket("b"))
        assert take(queue, 9) == ["a", "a", "a"]
        queue.put(ticket("b"))

    in_loop(scenario)


def test_a_request_that_no_replica_admits_lets_others_pass_and_keeps_its_place():
    def scenario() -> None:
        queue: RequestQueue[str] = RequestQueue(10)
        blocked, other = ticket("blocked"), ticket("other")
        queue.put(blocked)
        queue.put(other)
        assert queue.place(lambda t: None if t is blocked else "r") is other
        assert queue.place(lambda t: None if t is blocked else "r") is None
        queue.put(ticket("other"))
        assert queue.place(anywhere) is blocked
        assert blocked.placed.result() == "replica"

    in_loop(scenario)


def test_a_request_put_back_is_the_first_of_its_client():
    def scenario() -> None:
        queue: RequestQueue[str] = RequestQueue(2)
        first, second = ticket("a"), ticket("a")
        queue.put(first)
        queue.put(second)
        assert queue.place(anywhere) is first
        queue.put(ticket("a"))
        queue.put_back(first)  # also beyond the limit
        assert queue.place(anywhere) is first
        assert queue.place(anywhere) is second

    in_loop(scenario)


def test_a_cancelled_request_is_not_placed_and_a_failure_reaches_all_that_wait():
    def scenario() -> None:
        queue: RequestQueue[str] = RequestQueue(10)
        cancelled, waiting = ticket("a"), ticket("a")
        queue.put(cancelled)
        queue.put(waiting)
        queue.remove(cancelled)
        queue.remove(cancelled)
        queue.fail(RuntimeError("no replica is left"))
        assert str(waiting.placed.exception()) == "no replica is left"
        assert not cancelled.placed.done()
        assert queue.place(anywhere) is None
        assert len(queue) == 0

    in_loop(scenario)
