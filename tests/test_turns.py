"""Sessions take turns at the ranks, weighted by tokens."""

from typing import NamedTuple

from op_queues import queue_of, run, take


def test_two_sessions_take_turns():
    async def scenario() -> None:
        queue = queue_of("a", "b")
        for number in (1, 2, 3):
            queue.submit("a", number, f"a{number}")
        for number in (1, 2, 3):
            queue.submit("b", number, f"b{number}")
        assert await take(queue, 6) == ["a1", "b1", "a2", "b2", "a3", "b3"]

    run(scenario())


def test_a_session_that_comes_late_waits_for_one_operation_of_another_at_most():
    async def scenario() -> None:
        queue = queue_of("a", "b", "c")
        for number in range(1, 9):
            queue.submit("a", number, f"a{number}")
        assert await take(queue, 3) == ["a1", "a2", "a3"]
        queue.submit("c", 1, "c1")
        queue.submit("b", 1, "b1")
        assert set(await take(queue, 2)) == {"b1", "c1"}
        assert await take(queue, 2) == ["a4", "a5"]

    run(scenario())


class Weighted(NamedTuple):
    """An operation of so many tokens."""

    name: str
    num_tokens: int


def test_turns_are_weighted_by_tokens():
    async def scenario() -> None:
        queue = queue_of("big", "small")
        for number in range(1, 4):
            queue.submit("big", number, Weighted(f"big{number}", 100))
        for number in range(1, 21):
            queue.submit("small", number, Weighted(f"small{number}", 25))
        names = [op.name for op in await take(queue, 10)]
        assert names == ["big1", *(f"small{n}" for n in range(1, 5)), "big2", *(f"small{n}" for n in range(5, 9))]

    run(scenario())


def test_an_operation_waits_for_one_operations_worth_of_each_other_session_at_most():
    async def scenario() -> None:
        queue = queue_of("a", "b", "c")
        for session in ("a", "b"):
            for number in range(1, 30):
                queue.submit(session, number, Weighted(session, 7 * number % 50 + 1))
        await take(queue, 11)
        queue.submit("c", 1, Weighted("c", 3))
        waited = {"a": 0, "b": 0}
        while (op := (await take(queue, 1))[0]).name != "c":
            waited[op.name] += op.num_tokens
        assert max(waited.values()) <= 2 * 50  # what was left over of a turn, and a fresh one

    run(scenario())


def test_an_operation_without_tokens_belongs_to_the_turn_and_ends_it():
    async def scenario() -> None:
        queue = queue_of("a", "b")
        for session in ("a", "b"):
            for number in (1, 2, 3, 4):
                queue.submit(session, number, Weighted(f"{session}{number}", 10 * (number % 2)))
        names = [op.name for op in await take(queue, 8)]
        assert names == ["a1", "a2", "b1", "b2", "a3", "a4", "b3", "b4"]

    run(scenario())


def test_a_session_that_was_idle_has_saved_no_turns_up():
    async def scenario() -> None:
        queue = queue_of("a", "b")
        for number in range(1, 11):
            queue.submit("a", number, Weighted(f"a{number}", 10))
        assert len(await take(queue, 6)) == 6
        for number in range(1, 11):
            queue.submit("b", number, Weighted(f"b{number}", 10))
        assert [op.name for op in await take(queue, 6)] == ["b1", "a7", "b2", "a8", "b3", "a9"]

    run(scenario())
