"""vLLM's arguments for a config on this node, and its start."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import psutil
import vllm
from vllm.config import VllmConfig
from vllm.usage.usage_lib import UsageContext
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

from raysessions.actors.engines import cpu_kernels, vllm_plugin
from raysessions.actors.protocol import CoreShare
from raysessions.config import SamplingConfig
from raysessions.errors import PlacementError, SamplingPoolError
from raysessions.models import context_length

GIB = 1024**3
DEFAULT_KV_CACHE_GIB = 2.0
WHOLE_NODE = CoreShare(0, 1)


def start(arguments: dict[str, Any]) -> AsyncLLM:
    """An engine in a process of its own, with its threads bound to their cores. Raises `PlacementError` when its cache is too
    small, `SamplingPoolError` when it does not start for another reason."""
    given = vllm.AsyncEngineArgs(**arguments)
    config = given.create_engine_config(UsageContext.ENGINE_CONTEXT)
    with contextlib.ExitStack() as stack:
        if config.parallel_config.distributed_executor_backend is UniProcExecutor:  # vLLM sets it for workers' processes only
            stack.enter_context(OMPProcessManager(config).configure_omp_envs(0, 0))
        try:
            return AsyncLLM.from_vllm_config(
                config,
                stat_loggers=None if given.disable_log_stats else [RayPrometheusStatLogger],
                disable_log_stats=given.disable_log_stats,
            )
        except RuntimeError as error:  # vLLM tells why in its own process's words, which go to the actor's log
            _check_cache(config)
            raise SamplingPoolError(
                f"vLLM's engine did not start: {error} Its own words are in the log of the SamplingActor (`ray logs actor`, or "
                "the newest worker-*.err in the logs of Ray's session folder)."
            ) from error


def _check_cache(config: VllmConfig) -> None:
    """Whether the KV cache can hold one sequence as long as the context. Sizes are of plain attention in every layer."""
    model, cache_bytes = config.model_config, config.cache_config.kv_cache_memory_bytes
    heads = model.get_num_kv_heads(config.parallel_config) * model.get_num_layers(config.parallel_config)
    per_token = 2 * heads * model.get_head_size() * model.dtype.itemsize
    if cache_bytes is not None and cache_bytes < per_token * model.max_model_len:
        raise PlacementError(
            f"A KV cache of {cache_bytes / GIB:.2g} GiB holds {cache_bytes // per_token} tokens, and the context has "
            f"{model.max_model_len}: raise SamplingConfig.kv_cache_gib to {per_token * model.max_model_len / GIB * 1.05:.2g}, "
            "or lower max_model_len."
        )


def engine_arguments(
    folder: Path, config: SamplingConfig, share: CoreShare = WHOLE_NODE, *, with_adapters: bool = True
) -> dict[str, Any]:
    """vLLM's arguments for `config` on this node. Raises `PlacementError` when the node lacks the memory."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": config.dtype_for(folder),
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "enable_prefix_caching": True,
        "worker_extension_cls": "raysessions.actors.engines.vllm_worker.AdapterWorker",
        "disable_log_stats": not config.engine_metrics,
    }
    if with_adapters:
        arguments |= {
            "enable_lora": True,
            "max_loras": config.max_loras,
            "max_lora_rank": config.max_lora_rank,
            "max_cpu_loras": config.max_resident_loras,
        }
    if vllm.platforms.current_platform.is_cpu():
        kv_cache_bytes = int((config.kv_cache_gib or DEFAULT_KV_CACHE_GIB) * GIB)
        _check_memory(folder, kv_cache_bytes)
        arguments |= {
            "kv_cache_memory_bytes": kv_cache_bytes,
            "enforce_eager": True,
            # vLLM's 128 shares no prompt below 128 tokens between the samples of a group: 32 takes a GRPO step's sampling
            # from 2.2 to 1.5 s, for 9 % less decoding speed.
            "block_size": 32,
            # A prompt split over two steps makes vLLM 0.32 rewind a seeded request's generator, which a CPU generator
            # cannot do: the engine dies ("CPU Generator does not use offset").
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(2048, config.max_model_len or context_length(folder)),
        }
        if config.tensor_parallel_size == 1:
            # vLLM's name for it, "uni", is taken back on CPU, for want of bound threads: `start` binds them. Without a worker
            # of its own the engine starts in two thirds of the time and steps without messages between processes.
            arguments["distributed_executor_backend"] = UniProcExecutor
        if vllm_plugin.is_installed():
            arguments["ir_op_priority"] = cpu_kernels.IR_OP_PRIORITY
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = _cores(config.num_threads, share, config.tensor_parallel_size)
    else:
        arguments["enable_sleep_mode"] = config.sleep
        if config.gpu_memory_utilization is not None:
            _check_gpu_memory(config.gpu_memory_utilization)
            arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    return arguments | config.engine_kwargs


def _check_memory(folder: Path, kv_cache_bytes: int) -> None:
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed, free = weights + kv_cache_bytes + GIB, psutil.virtual_memory().available
    if needed > free:
        raise PlacementError(
            f"The sampler needs about {needed / GIB:.1f} GiB (weights {weights / GIB:.1f}, KV cache "
            f"{kv_cache_bytes / GIB:.1f}, vLLM 1.0); this node has {free / GIB:.1f} GiB free. "
            "Lower SamplingConfig.kv_cache_gib, or free memory."
        )


def _check_gpu_memory(utilization: float) -> None:
    """Asks the driver, not torch, which would keep memory on the GPU for this process."""
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    device = vllm.platforms.current_platform.device_id_to_physical_device_id(0)
    memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(device))
    needed, free = utilization * memory.total, memory.free
    if needed > free:
        raise PlacementError(
            f"SamplingConfig.gpu_memory_utilization={utilization:g} takes {needed / GIB:.1f} of the GPU's "
            f"{memory.total / GIB:.1f} GiB, and {free / GIB:.1f} are free. Lower it to at most {free / memory.total:.2f}, or "
            "give the sampler another GPU."
        )


def _cores(num_threads: int | None, share: CoreShare, num_processes: int) -> str:
    """The cores to bind to, as vLLM wants them named: a list for each of its worker processes. Unbound, one keeps to one
    thread."""
    cores = sorted(os.sched_getaffinity(0))
    count = num_threads or max(1, len(cores) // share.count)
    first = share.index * count
    own = [cores[(first + i) % len(cores)] for i in range(min(count, len(cores)))]
    per_process = max(1, len(own) // num_processes)
    starts = [i * per_process % len(own) for i in range(num_processes)]
    return "|".join(",".join(map(str, own[start : start + per_process])) for start in starts)
