"""The order of operations: by sequence number within a session, sessions in turn, and each number once."""

import asyncio

import pytest
from op_queues import is_empty, queue_of, run, take

from raysessions import RequestCancelledError, SessionStoppedError, ValidationError
from raysessions.actors.op_queue import KEPT_RESULTS, Entry


@pytest.mark.parametrize("order", [[1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3]])
def test_operations_run_in_the_order_of_their_numbers_whatever_the_order_of_arrival(order: list[int]):
    async def scenario() -> None:
        queue = queue_of("a")
        futures = {number: queue.submit("a", number, f"op{number}") for number in order}
        assert await take(queue, 4) == ["op1", "op2", "op3", "op4"]
        assert [await futures[number] for number in (1, 2, 3, 4)] == ["op1 done", "op2 done", "op3 done", "op4 done"]
        assert await is_empty(queue)

    run(scenario())


def test_a_gap_waits_until_it_is_filled():
    async def scenario() -> None:
        queue = queue_of("a")
        queue.submit("a", 1, "op1")
        third = queue.submit("a", 3, "op3")
        assert await take(queue, 1) == ["op1"]
        assert await is_empty(queue)
        assert not third.done()
        queue.submit("a", 2, "op2")
        assert await take(queue, 2) == ["op2", "op3"]

    run(scenario())


def test_a_gap_of_one_session_does_not_hold_up_another():
    async def scenario() -> None:
        queue = queue_of("a", "b")
        queue.submit("a", 2, "a2")
        queue.submit("b", 1, "b1")
        queue.submit("b", 2, "b2")
        assert await take(queue, 2) == ["b1", "b2"]
        assert await is_empty(queue)

    run(scenario())


def test_the_next_operation_is_waited_for():
    async def scenario() -> None:
        queue = queue_of("a")
        waiting = asyncio.create_task(queue.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        queue.submit("a", 1, "op1")
        entry = await waiting
        assert (entry.session_id, entry.seq_id, entry.op, entry.begun) == ("a", 1, "op1", True)

    run(scenario())


def test_a_repeated_number_gets_the_first_result_and_runs_nothing():
    async def scenario() -> None:
        queue = queue_of("a")
        first = queue.submit("a", 1, "op1")
        assert queue.submit("a", 1, "op1") is first  # while it waits
        entry = await queue.next()
        assert queue.submit("a", 1, "op1") is first  # while it runs
        entry.outcome.set_result("the first result")
        assert queue.submit("a", 1, "op1") is first  # when it is done
        assert await first == "the first result"
        assert await is_empty(queue)
        queue.submit("a", 2, "op2")
        assert await take(queue, 1) == ["op2"]

    run(scenario())


def test_a_repeated_number_gets_the_first_error():
    async def scenario() -> None:
        queue = queue_of("a")
        queue.submit("a", 1, "op1")
        (await queue.next()).outcome.set_exception(ArithmeticError("the first error"))
        with pytest.raises(ArithmeticError, match="the first error"):
            await queue.submit("a", 1, "op1")

    run(scenario())


def test_results_are_kept_for_a_while_and_older_numbers_are_refused():
    async def scenario() -> None:
        queue = queue_of("a")
        for number in range(1, KEPT_RESULTS + 2):
            queue.submit("a", number, f"op{number}")
        await take(queue, KEPT_RESULTS + 1)
        assert await queue.submit("a", 2, "op2") == "op2 done"
        with pytest.raises(ValidationError, match="Operation 1 of session a ended too long ago"):
            queue.submit("a", 1, "op1")
        assert await is_empty(queue)

    run(scenario())


def test_an_outcome_can_be_awaited_before_its_operation_comes():
    async def scenario() -> None:
        queue = queue_of("a")
        second = queue.outcome("a", 2)
        queue.submit("a", 1, "op1")
        assert await take(queue, 1) == ["op1"]
        assert await is_empty(queue)
        assert not second.done()
        assert queue.submit("a", 2, "op2") is second
        assert await take(queue, 1) == ["op2"]
        assert await second == "op2 done"
        assert queue.outcome("a", 2) is second

    run(scenario())


def test_an_awaited_outcome_can_be_cancelled_and_ends_with_its_session():
    async def scenario() -> None:
        queue = queue_of("a")
        first, second = queue.outcome("a", 1), queue.outcome("a", 2)
        assert queue.cancel("a", 1)
        assert not queue.cancel("a", 1)
        assert queue.submit("a", 1, "op1") is first
        assert await is_empty(queue)
        with pytest.raises(RequestCancelledError):
            await first
        queue.close("a")
        with pytest.raises(SessionStoppedError):
            await second

    run(scenario())


def test_a_cancelled_operation_never_runs_and_the_next_one_does():
    async def scenario() -> None:
        queue = queue_of("a")
        futures = [queue.submit("a", number, f"op{number}") for number in (1, 2, 3)]
        assert queue.cancel("a", 2) is True
        assert await take(queue, 2) == ["op1", "op3"]
        with pytest.raises(RequestCancelledError, match="nothing was applied"):
            await futures[1]
        assert queue.cancel("a", 2) is False
        with pytest.raises(RequestCancelledError):
            await queue.submit("a", 2, "op2")
        assert await is_empty(queue)

    run(scenario())


def test_an_operation_cancelled_behind_a_gap_does_not_run_when_the_gap_is_filled():
    async def scenario() -> None:
        queue = queue_of("a")
        queue.submit("a", 2, "op2")
        queue.submit("a", 3, "op3")
        assert queue.cancel("a", 2) is True
        assert await is_empty(queue)
        queue.submit("a", 1, "op1")
        assert await take(queue, 2) == ["op1", "op3"]

    run(scenario())


def test_an_operation_that_has_begun_or_is_not_there_cannot_be_cancelled():
    async def scenario() -> None:
        queue = queue_of("a")
        future = queue.submit("a", 1, "op1")
        entry = await queue.next()
        assert queue.cancel("a", 1) is False
        entry.outcome.set_result("done")
        assert queue.cancel("a", 1) is False
        assert await future == "done"
        assert queue.cancel("a", 2) is False
        assert queue.cancel("nobody", 1) is False

    run(scenario())


def test_closing_a_session_fails_what_has_not_begun_and_nothing_else():
    async def scenario() -> None:
        queue = queue_of("a", "b")
        running, waiting, behind_a_gap = (queue.submit("a", number, f"a{number}") for number in (1, 2, 4))
        entry: Entry = await queue.next()
        other = queue.submit("b", 1, "b1")
        queue.close("a")
        for future in (waiting, behind_a_gap):
            with pytest.raises(SessionStoppedError, match="Session a was stopped"):
                await future
        assert not running.done()
        entry.outcome.set_result("a1 done")
        assert await running == "a1 done"
        assert ("a" in queue, "b" in queue) == (False, True)
        assert await take(queue, 1) == ["b1"]
        assert await other == "b1 done"

    run(scenario())


def test_an_unknown_or_closed_session_takes_no_operation():
    async def scenario() -> None:
        queue = queue_of("a")
        queue.close("a")
        for session_id in ("a", "never"):
            with pytest.raises(SessionStoppedError, match=f"Session {session_id} was stopped, or never was"):
                queue.submit(session_id, 1, "op1")
        assert await is_empty(queue)

    run(scenario())


def test_a_session_may_be_closed_twice():
    """A host that stops closes all its sessions, also one that is just being closed."""

    async def main() -> None:
        queue = queue_of("a", "b")
        queue.close("a")
        queue.close("a")
        assert "a" not in queue
        assert "b" in queue

    run(main())
