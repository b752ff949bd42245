"""Keeping a detached session alive for as long as a client of it is open."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from ray.exceptions import RayError


def renew_while_alive(client: object, manager: Any, session_id: str, lease_s: float) -> None:
    """Renews the session's lease three times in its length, until `client` is collected or this process ends."""
    gone = threading.Event()
    weakref.finalize(client, gone.set)

    def renew() -> None:
        while not gone.wait(lease_s / 3):
            try:
                manager.renew.remote(session_id)
            except RayError:
                return  # the cluster is gone

    threading.Thread(target=renew, name=f"lease of {session_id}", daemon=True).start()
