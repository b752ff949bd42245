"""Where actors run: their options in one place, and a sentence when the cluster has no room."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError

from raysessions.config import ActorConfig
from raysessions.errors import PlacementError

MAX_CALLS = 10_000
"""Calls that one async actor holds at the same time: every unfinished future is one."""

T = TypeVar("T")


def light_actor(cls: type[T], **options: Any) -> Any:
    """An actor class that only passes messages: no CPU of its own."""
    return ray.remote(cls).options(num_cpus=0, max_concurrency=MAX_CALLS, **options)


async def place_engine_actor(cls: type[T], *args: Any, config: ActorConfig, is_async: bool = False) -> Any:
    """Creates an actor that holds an engine and waits until it has a place.

    Raises `PlacementError` naming what was asked and what each node has free.
    """
    options = {"num_cpus": 1, "num_gpus": _default_gpus(), **config.actor_options}
    if is_async:
        options["max_concurrency"] = MAX_CALLS
    actor = ray.remote(cls).options(**options).remote(*args)
    try:
        await asyncio.wait_for(_placed(actor), config.placement_timeout_s)
    except (TimeoutError, ActorUnschedulableError) as error:
        ray.kill(actor)
        raise PlacementError(
            f"No node had room for a {cls.__name__} within {config.placement_timeout_s:g} s. Asked: {_asked(options)}; "
            f"free: {_free()}. Lower actor_options, stop other sessions, or add a node."
        ) from error
    except RayActorError as error:
        raise PlacementError(f"The process of a {cls.__name__} did not start: {error}") from error
    return actor


async def _placed(actor: Any) -> None:
    await actor.ping.remote()


def _default_gpus() -> float:
    return 1 if ray.cluster_resources().get("GPU", 0) else 0


def _asked(options: dict[str, Any]) -> str:
    asked = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options.get("resources", {})}
    return ", ".join(f"{name} {amount:g}" for name, amount in asked.items() if amount)


def _free() -> str:
    """What each node has left of its CPUs, GPUs and custom resources."""
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        free = available.get(node["NodeID"], {})
        shown = [
            f"{name} {free.get(name, 0):g} of {total:g}"
            for name, total in sorted(node["Resources"].items())
            if not name.startswith(("node:", "accelerator_type:")) and "memory" not in name
        ]
        nodes.append(f"{node['NodeManagerAddress']} {', '.join(shown)}")
    return "; ".join(nodes)
