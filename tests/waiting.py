"""Waiting for what happens in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Returns once `condition()` is true; it is looked at ten times a second."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout_s:g} s"
        time.sleep(0.1)
