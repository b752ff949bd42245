"""How many threads an actor's mathematics may use."""

from __future__ import annotations

import os


def limit_threads(num_threads: int | None, *, shared_by: int = 1) -> int:
    """Sets OpenMP's threads for this process and its children. Call before torch is imported: it reads this once.

    None: this process's share of the node's cores. Ray by itself would set as many as the actor's num_cpus.
    """
    count = num_threads or max(1, len(os.sched_getaffinity(0)) // shared_by)
    os.environ["OMP_NUM_THREADS"] = str(count)
    return count
