"""Waiting for another actor inside an actor."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raysessions.errors import SessionError


async def answer(ref: ray.ObjectRef, *, if_dead: SessionError) -> Any:
    """The other actor's answer, its own error instead of Ray's wrapper, or `if_dead` when its process is gone."""
    try:
        return await ref
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise type(if_dead)(f"{if_dead} Ray says: {str(error).splitlines()[0]}") from error
