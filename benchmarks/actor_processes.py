"""The actors' processes of this script's own Ray, to kill one."""

from __future__ import annotations

import os
import signal

import psutil


def processes_of(name: str) -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if process.name().startswith(f"ray::{name}")]


def kill(name: str) -> bool:
    """One actor of that class, as a crash would. False if there is none just now."""
    for process in processes_of(name):
        os.kill(process.pid, signal.SIGKILL)
        return True
    return False
