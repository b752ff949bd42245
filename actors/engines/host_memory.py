"""The C library's memory."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
THRESHOLD_BYTES = 2**20


def give_back_freed_memory() -> None:
    """From now on, what is freed in blocks above 1 MiB goes back to the system at once.

    glibc raises that limit to 32 MiB as blocks come and go, and then keeps most of what ZeRO stage 3 gathers and frees: a rank
    that needs 1 GiB held 2. Elsewhere than on glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, THRESHOLD_BYTES)
