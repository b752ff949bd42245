"""Where actors run: their options in one place, and a sentence when the cluster has no room."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raysessions.config import ActorConfig
from raysessions.errors import PlacementError

MAX_CALLS = 10_000
"""Calls that one async actor holds at the same time: every unfinished future is one."""

NAMESPACE = "raysessions"
"""Of the actors' names."""

RESTARTED = {"max_restarts": -1, "max_task_retries": -1}

T = TypeVar("T")


def light_actor(cls: type[T], **options: Any) -> Any:
    """An actor class that only passes messages: no CPU of its own."""
    return ray.remote(cls).options(num_cpus=0, max_concurrency=MAX_CALLS, **options)


def durable_actor(cls: type[T], name: str, *args: Any, elsewhere: bool = False, **kwargs: Any) -> Any:
    """A light actor that belongs to nobody and is started again when its process dies; calls that it had not answered are then
    made again. It ends by `ray.kill`. On this node, or with `elsewhere` on another one if there is any."""
    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    node_id = others[0] if elsewhere and others else here
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True),
        "memory": 1,  # byte: Ray gives an actor that asks for nothing a node at random, whatever its strategy says
        **RESTARTED,
    }
    return light_actor(cls, **options).remote(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Placed:
    """Actors with a place."""

    actors: list[Any]
    group: PlacementGroup | None

    def end(self) -> None:
        """Kills the actors and gives back what was reserved for them: Ray would keep a group until its job ends."""
        for actor in self.actors:
            ray.kill(actor)
        if self.group is not None:
            remove_placement_group(self.group)


async def place_engine_actors(cls: type[T], *args: Any, config: ActorConfig, count: int = 1, is_async: bool = False) -> Placed:
    """Creates actors that hold an engine and waits until all have a place.

    Several are placed together or not at all, on as few nodes as will do, unless `actor_options` has a scheduling strategy.
    Raises `PlacementError` naming what was asked and what each node has free.
    """
    options = engine_options(config)
    if is_async:
        options["max_concurrency"] = MAX_CALLS
    group = _reserve(options, count) if count > 1 and "scheduling_strategy" not in options else None
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
        options.pop("label_selector", None)  # its bundles have it
    placed = Placed([ray.remote(cls).options(**options).remote(*args) for _ in range(count)], group)
    try:
        await asyncio.wait_for(asyncio.gather(*map(_ping, placed.actors)), config.placement_timeout_s)
    except BaseException as error:
        placed.end()
        if isinstance(error, TimeoutError | ActorUnschedulableError):
            raise PlacementError(
                f"No room for {count} {cls.__name__}{'s' if count > 1 else ''} within {config.placement_timeout_s:g} s. "
                f"Asked for each: {_asked(options)}; free: {_free()}. Lower actor_options or num_workers, stop other "
                "sessions, or add a node."
            ) from error
        if isinstance(error, RayActorError):
            raise PlacementError(f"The process of a {cls.__name__} did not start: {error}") from error
        raise
    return placed


def engine_options(config: ActorConfig) -> dict[str, Any]:
    """Ray's options for an actor that holds an engine."""
    return {"num_cpus": 1, "num_gpus": _default_gpus(), **config.actor_options}


def _reserve(options: dict[str, Any], count: int) -> PlacementGroup | None:
    """A place for each of `count` actors; None if they ask for no resources."""
    bundle = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options.get("resources", {})}
    bundle["memory"] = options.get("memory") or 0
    if accelerator := options.get("accelerator_type"):
        bundle[f"accelerator_type:{accelerator}"] = 0.001  # what Ray asks for in its name
    bundle = {name: amount for name, amount in bundle.items() if amount}
    if not bundle:
        return None
    selector = options.get("label_selector")
    owner = ray.get_runtime_context().get_actor_name() or ""
    if owner:
        _remove_left_over(owner)
    return placement_group(
        [bundle] * count, strategy="PACK", name=owner, bundle_label_selector=[selector] * count if selector else None
    )


def _remove_left_over(name: str) -> None:
    """The group that this actor reserved before its process died and was started again: Ray keeps it."""
    try:
        remove_placement_group(ray.util.get_placement_group(name))
    except ValueError:
        return  # there is none


async def _ping(actor: Any) -> None:
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
