"""Whether processes do anything."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil


def is_stopped(processes: Iterable[psutil.Process]) -> bool:
    """Whether one of them was stopped by a signal."""
    return any(process.is_running() and process.status() == psutil.STATUS_STOPPED for process in processes)


def active_seconds(processes: Iterable[psutil.Process]) -> float:
    """How long their threads have computed so far, or waited for a core to compute on (Linux). One that sleeps, hangs in a
    lock or is stopped adds nothing; one that others keep from the cores does."""
    nanoseconds = 0
    for process in processes:
        for stat in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            try:
                ran, waited, _ = stat.read_text().split()
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            nanoseconds += int(ran) + int(waited)
    return nanoseconds / 1e9
