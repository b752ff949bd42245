"""Waiting for a start, and saying what it waits for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import ray

from raysessions.errors import RequestTimeoutError
from raysessions.future import APIFuture

POLL_S = 0.25
READY = "ready"
SPEAK_S = 30.0
"""Without a new phase, a line is printed this often."""


def wait_with_progress(ref: ray.ObjectRef, what: str, phase: Callable[[], ray.ObjectRef], timeout_s: float) -> Any:
    """The result of `ref`. Prints a line to stderr at each new phase, with the seconds so far.

    Raises the operation's own error, or `RequestTimeoutError` after `timeout_s`.
    """
    started = spoken = time.monotonic()
    shown = None
    future: APIFuture[Any] = APIFuture(ref)
    while not future.done():
        now = time.monotonic()
        if now - started > timeout_s:
            raise RequestTimeoutError(f"{what} was not ready within {timeout_s:g} s (still {shown}). Raise timeout_s.")
        current = _current(phase, shown)
        if current == READY:  # started already: there is nothing to tell
            current = shown
        if current != shown or (shown and now - spoken > SPEAK_S):
            _say(what, f"{current} …", now - started)
            shown, spoken = current, now
        ray.wait([ref], timeout=POLL_S, fetch_local=False)
    result = future.result()
    if shown is not None:
        _say(what, READY, time.monotonic() - started)
    return result


def _current(phase: Callable[[], ray.ObjectRef], shown: str | None) -> str | None:
    """The phase now; the last one when the answer does not come at once."""
    ref = phase()
    ready, _ = ray.wait([ref], timeout=POLL_S)
    return ray.get(ref) if ready else shown


def _say(what: str, text: str, seconds: float) -> None:
    print(f"[raysessions] {what}: {text} ({seconds:.1f} s)", file=sys.stderr, flush=True)
