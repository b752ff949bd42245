"""Requests that wait for a replica: clients take turns by tokens. Plain Python.

Each client has a counter of the tokens it was given, and the one with the least goes next (virtual token counters, Sheng et
al. 2024, "Fairness in Serving Large Language Models"). One that comes back after a pause starts level with the others: it
saves nothing up.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from raysessions.actors.sampling_versions import Version
from raysessions.errors import BackPressureError
from raysessions.operations import OpenAiRequest, SampleRequest

R = TypeVar("R")
"""A replica."""


@dataclass(slots=True, eq=False)
class Ticket(Generic[R]):
    """One request on its way through the pool."""

    client_id: str
    version: Version | None
    """None: the base model."""
    request: SampleRequest | OpenAiRequest
    num_tokens: int
    """Prompt and new ones, as many as there may be."""
    blocks: Sequence[int]
    """Of its prompt, for the router."""
    placed: asyncio.Future[R] = field(init=False)
    """The replica that has room for it."""
    failures: int = 0
    """Replicas that failed under it."""
    since: float = field(default_factory=time.monotonic)

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since

    @property
    def adapter_id(self) -> int | None:
        return None if self.version is None else self.version.adapter_id


@dataclass(slots=True)
class _Line:
    """What waits of one client."""

    given: float
    """Tokens, on the clock of all clients."""
    tickets: deque[Ticket] = field(default_factory=deque)


class RequestQueue(Generic[R]):
    """Bounded: beyond `limit` a request is refused at once, instead of waiting where nobody sees it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: dict[str, _Line] = {}
        self._clock = 0.0

    def __len__(self) -> int:
        return sum(len(line.tickets) for line in self._lines.values())

    def put(self, ticket: Ticket[R]) -> None:
        if len(self) >= self._limit:
            raise BackPressureError(
                f"{self._limit} requests wait for a sampler already: await some of them before sending more, add replicas "
                "(service.scale_samplers), or raise SamplingConfig.max_queued_requests."
            )
        self._line(ticket).append(ticket)

    def put_back(self, ticket: Ticket[R]) -> None:
        """Before all others of its client: it has had its turn, and its replica failed."""
        self._line(ticket).appendleft(ticket)

    def remove(self, ticket: Ticket[R]) -> None:
        """Safe to call when it does not wait any more."""
        line = self._lines.get(ticket.client_id)
        if line is not None and ticket in line.tickets:
            line.tickets.remove(ticket)
            if not line.tickets:
                del self._lines[ticket.client_id]

    def place(self, choose: Callable[[Ticket[R]], R | None]) -> Ticket[R] | None:
        """Takes the next ticket for which `choose` has a replica, and resolves its `placed`. None when there is none."""
        for client_id, line in sorted(self._lines.items(), key=lambda item: item[1].given):
            ticket = line.tickets[0]
            replica = choose(ticket)
            if replica is None:
                continue
            line.tickets.popleft()
            self._clock = max(self._clock, line.given)
            line.given += ticket.num_tokens
            if not line.tickets:
                del self._lines[client_id]
            ticket.placed.set_result(replica)
            return ticket
        return None

    def fail(self, error: Exception) -> None:
        """Everything that waits fails with `error`."""
        for line in self._lines.values():
            for ticket in line.tickets:
                ticket.placed.set_exception(error)
        self._lines.clear()

    def _line(self, ticket: Ticket[R]) -> deque[Ticket[R]]:
        ticket.placed = asyncio.get_running_loop().create_future()
        return self._lines.setdefault(ticket.client_id, _Line(self._clock)).tickets
