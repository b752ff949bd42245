"""What raysessions changes in vLLM, in each of its processes.

Loaded by vLLM itself as a `vllm.general_plugins` entry point, and by `vllm_worker` where the package is only on PYTHONPATH
(a Ray working_dir) and has no entry points.
"""

from __future__ import annotations

import functools
import multiprocessing
from importlib.metadata import entry_points

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform

from raysessions.actors.engines import cpu_kernels, cpu_sampler, grouped_lora
from raysessions.actors.engines.parent_death import end_with_parent


def is_installed() -> bool:
    """Whether vLLM's processes find this plugin by themselves, before they read their arguments."""
    return any(entry.name == "raysessions" for entry in entry_points(group="vllm.general_plugins"))


def register() -> None:
    """Safe to call again."""
    if multiprocessing.parent_process() is not None:  # one of vLLM's own, not the actor that it serves
        end_with_parent()
    if current_platform.is_cpu():
        grouped_lora.register()
        cpu_kernels.register()
        cpu_sampler.register()
        _wait_without_spinning()


SPIN_S = 0.002
"""How long a reader looks for the next message in a busy loop after it has read one."""
LOOK_EVERY_MS = 50
"""How often one that sleeps looks for a message by itself."""


def _wait_without_spinning() -> None:
    """vLLM's engine process looks for the worker's answer in a busy loop for a second. On a CPU that takes the core the
    worker computes on: 467 → 494 tokens/s, with adapter 335 → 360 (two cores, SmolLM2-135M, 64 sequences).

    After the loop a reader sleeps until it is told of a message, and is never told of one that follows another within about
    a millisecond: ZeroMQ drops it for a send queue that it holds to be full. The loop is longer than that, and a reader that
    misses one all the same looks by itself soon.
    """
    stock = SpinCondition.wait
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        stock(self, LOOK_EVERY_MS if timeout_ms is None else min(timeout_ms, LOOK_EVERY_MS))

    SpinCondition.wait = wait
    SpinCondition.__init__.__defaults__ = (SPIN_S,)  # busy_loop_s
