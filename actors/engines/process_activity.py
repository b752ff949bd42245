"""Whether processes do anything."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil


def is_stopped(processes: Iterable[psutil.Process]) -> bool:
    """Whether one of them was stopped by a signal."""
    return any(process.is_running() and process.status() == psutil.STATUS_STOPPED for process in processes)


def active_nanoseconds(processes: Iterable[psutil.Process]) -> dict[Path, int]:
    """How long each of their threads has computed so far, or waited for a core to compute on (Linux). One that sleeps, hangs in
    a lock or is stopped adds nothing; one that others keep from the cores does."""
    nanoseconds = {}
    for process in processes:
        for stat in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            try:
                ran, waited, _ = stat.read_text().split()
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            nanoseconds[stat] = int(ran) + int(waited)
    return nanoseconds


def active_seconds_since(before: dict[Path, int], processes: Iterable[psutil.Process]) -> float:
    """Of the threads that there are now: one that has ended takes what it had done with it."""
    now = active_nanoseconds(processes)
    return sum(total - before.get(thread, 0) for thread, total in now.items()) / 1e9
