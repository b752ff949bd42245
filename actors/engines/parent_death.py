"""A process that ends with its parent, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Asks the kernel (Linux) to kill this process when its parent has ended. Unlike a watch of its own, that works for a
    process that hangs."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended meanwhile, and nobody would tell
        os.kill(os.getpid(), signal.SIGKILL)
