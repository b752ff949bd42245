"""Whether processes do anything."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil


def is_stopped(processes: Iterable[psutil.Process]) -> bool:
    """Whether one of them was stopped by a signal."""
    return any(process.is_running() and process.status() == psutil.STATUS_STOPPED for process in processes)


def descendants() -> list[psutil.Process]:
    """Of this process, as of now: an engine that compiles starts others to do it."""
    return psutil.Process().children(recursive=True)


def active_nanoseconds(processes: Iterable[psutil.Process]) -> dict[str, int]:
    """How long each of their threads has computed so far, or waited for a core to compute on, and how long each one's children
    had computed that have ended (Linux). What sleeps, hangs in a lock or is stopped adds nothing; what others keep from the
    cores does."""
    nanoseconds = {}
    for process in processes:
        for stat in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            try:
                ran, waited, _ = stat.read_text().split()
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            nanoseconds[str(stat)] = int(ran) + int(waited)
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        nanoseconds[f"children of {process.pid}"] = int(1e9 * (times.children_user + times.children_system))
    return nanoseconds


def active_seconds_since(before: dict[str, int]) -> float:
    """Of the descendants that there are now: a thread that has ended takes what it had done with it."""
    now = active_nanoseconds(descendants())
    return sum(total - before.get(name, 0) for name, total in now.items()) / 1e9
