"""Who in the cluster still holds something.

A lease is an empty object in Ray: its owner counts the references to it in all processes, pickled copies included, and learns
of processes that die. So a lease needs no heartbeat and no release.
"""

from __future__ import annotations

import ray
from ray._private.worker import global_worker


def new_lease() -> ray.ObjectRef:
    """Held by whoever has a copy of it. Its maker must remember the id alone."""
    return ray.put(None)


def is_held(lease_id: bytes) -> bool:
    """Whether anybody has a copy of the lease, which this process made."""
    return lease_id.hex().encode() in global_worker.core_worker.get_all_reference_counts()
