"""Waiting for a start, and saying what it waits for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from raysessions.errors import RequestTimeoutError
from raysessions.future import APIFuture

POLL_S = 0.25
READY = "ready"
SPEAK_S = 30.0
"""Without a new phase, a line is printed this often."""


def wait_with_progress(ref: ray.ObjectRef, what: str, phase: Callable[[], ray.ObjectRef], timeout_s: float) -> Any:
    """The result of `ref`. Tells on stderr each new phase, with the seconds so far: a line that moves in a terminal, lines in
    a notebook or a log.

    Raises the operation's own error, or `RequestTimeoutError` after `timeout_s`.
    """
    started = time.monotonic()
    shown = None
    future: APIFuture[Any] = APIFuture(ref)
    with _teller(what) as tell:
        while not future.done():
            if time.monotonic() - started > timeout_s:
                raise RequestTimeoutError(f"{what} was not ready within {timeout_s:g} s (still {shown}). Raise timeout_s.")
            current = _current(phase, shown)
            if current != READY and current is not None:  # else it had started before, and there is nothing to tell
                shown = current
                tell(current)
            ray.wait([ref], timeout=POLL_S, fetch_local=False)
        result = future.result()
        if shown is not None:
            tell(READY)
    return result


def _teller(what: str) -> Lines | Spinner:
    console = Console(stderr=True)
    return Spinner(what, console) if console.is_terminal else Lines(what)


class Lines:
    """For a log: a line at each new phase, and now and then without one."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = self._spoken = time.monotonic()
        self._shown: str | None = None

    def __enter__(self) -> Callable[[str], None]:
        return self._tell

    def __exit__(self, *error: object) -> None:
        return

    def _tell(self, phase: str) -> None:
        now = time.monotonic()
        if phase != self._shown or now - self._spoken > SPEAK_S:
            self._shown, self._spoken = phase, now
            text = phase if phase == READY else f"{phase} …"
            print(f"[raysessions] {self._what}: {text} ({now - self._started:.1f} s)", file=sys.stderr, flush=True)


class Spinner:
    """For a person: one line that moves, and stays when it is over."""

    def __init__(self, what: str, console: Console) -> None:
        columns = SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn()
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task(what, total=1, start=True)
        self._what = what

    def __enter__(self) -> Callable[[str], None]:
        self._progress.start()
        return self._tell

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def _tell(self, phase: str) -> None:
        self._progress.update(self._task, description=f"{self._what}: {phase}", completed=phase == READY)


def _current(phase: Callable[[], ray.ObjectRef], shown: str | None) -> str | None:
    """The phase now; the last one when the answer does not come at once."""
    ref = phase()
    ready, _ = ray.wait([ref], timeout=POLL_S)
    return ray.get(ref) if ready else shown
