"""The sampling engine: vLLM's AsyncLLM, with adapters that come and go while it generates."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import psutil
import vllm
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from raysessions.actors.engines import cpu_kernels, vllm_plugin
from raysessions.actors.engines.adapter_files import AdapterFiles
from raysessions.actors.engines.merged_weights import write_merged
from raysessions.actors.engines.process_activity import active_seconds, is_stopped
from raysessions.actors.protocol import CoreShare, ModelFacts, ReplicaFailedError
from raysessions.adapter_weights import AdapterWeights
from raysessions.config import SamplingConfig
from raysessions.errors import PlacementError
from raysessions.models import context_length
from raysessions.operations import SampleRequest
from raysessions.types import SampledSequence, SampleResponse, SamplingParams

GIB = 1024**3
MIN_ACTIVE = 0.5
"""Share of the time that an engine on CPU which does not answer must have computed, or waited for a core, not to be stuck.
Looking for messages takes a few hundredths."""
DEFAULT_KV_CACHE_GIB = 2.0
WHOLE_NODE = CoreShare(0, 1)


class VllmEngine:
    """One replica: an engine process of its own, driven from one event loop."""

    def __init__(
        self, folder: Path, config: SamplingConfig, share: CoreShare = WHOLE_NODE, merged: AdapterWeights | None = None
    ) -> None:
        """With `merged`, an adapter, the engine serves the base model with that added to its weights, and no others."""
        with contextlib.ExitStack() as stack:
            if merged is not None:
                base, folder = folder, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raysessions-merged-")))
                write_merged(base, merged, folder)
            arguments = engine_arguments(folder, config, share, with_adapters=merged is None)
            self._engine = AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments))
        model = self._engine.model_config
        self.facts = ModelFacts(model.get_vocab_size(), model.max_model_len, str(model.dtype).removeprefix("torch."))
        self._can_sleep = config.sleep and not vllm.platforms.current_platform.is_cpu()
        self._files = AdapterFiles()
        self._files.note_buffers(process.pid for process in psutil.Process().children(recursive=True))
        self._adapters: dict[int, LoRARequest] = {}
        self._request_ids = itertools.count()

    async def add_adapter(self, adapter_id: int, name: str, weights: AdapterWeights) -> int:
        """Loads the adapter; returns the number of modules it was bound to. On an error nothing stays behind."""
        request = LoRARequest(name, adapter_id, str(self._files.write(adapter_id, weights)))
        try:
            await self._engine.add_lora(request)
            bound = min(await self._engine.collective_rpc("count_bound_modules", args=(adapter_id,)))
        except EngineDeadError as error:
            self._files.remove(adapter_id)
            raise _failed(error) from error
        except BaseException:
            self._files.remove(adapter_id)
            raise
        self._adapters[adapter_id] = request
        return bound

    async def remove_adapter(self, adapter_id: int) -> None:
        self._adapters.pop(adapter_id, None)
        try:
            await self._engine.remove_lora(adapter_id)
        except EngineDeadError as error:
            raise _failed(error) from error
        self._files.remove(adapter_id)

    async def sample(self, request: SampleRequest, adapter_id: int | None) -> SampleResponse:
        # vLLM refuses n > 1 for greedy sampling: the samples are the same one.
        copies = request.num_samples if request.params.temperature == 0 else 1
        outputs = self._engine.generate(
            {"prompt_token_ids": request.prompt},
            self._sampling_params(request, num_samples=request.num_samples // copies),
            request_id=str(next(self._request_ids)),
            lora_request=None if adapter_id is None else self._adapters[adapter_id],
        )
        try:
            (final,) = [output async for output in outputs]  # FINAL_ONLY: one, when all samples have ended
        except EngineDeadError as error:
            raise _failed(error) from error
        sequences = [_sequence(output) for output in sorted(final.outputs, key=lambda output: output.index)]
        return SampleResponse(
            sequences=sequences * copies,
            prompt_logprobs=_prompt_logprobs(final) if request.prompt_logprobs else None,
            topk_prompt_logprobs=_topk(final, request.topk_prompt_logprobs) if request.topk_prompt_logprobs else None,
        )

    async def check_health(self, timeout_s: float) -> None:
        processes = psutil.Process().children(recursive=True)
        before = active_seconds(processes)
        try:
            async with asyncio.timeout(timeout_s):
                await self._engine.collective_rpc("answer")
        except EngineDeadError as error:
            raise _failed(error) from error
        except TimeoutError as error:
            # It answers between two steps, and on CPU one step may take long. A GPU's never do.
            computes = active_seconds(processes) - before > MIN_ACTIVE * timeout_s and not is_stopped(processes)
            if not (computes and vllm.platforms.current_platform.is_cpu()):
                raise ReplicaFailedError(f"vLLM's engine did not answer for {timeout_s:g} s, nor did it compute.") from error

    async def sleep(self) -> None:
        if self._can_sleep:
            await self._engine.sleep(level=1)

    async def wake_up(self) -> None:
        if self._can_sleep:
            await self._engine.wake_up()

    def num_unfinished(self) -> int:
        return self._engine.output_processor.get_num_unfinished_requests()

    def shutdown(self) -> None:
        self._engine.shutdown()
        self._files.close()

    def _sampling_params(self, request: SampleRequest, num_samples: int) -> vllm.SamplingParams:
        params = request.params
        strings, token_ids = _split_stop(params)
        wants_prompt = request.prompt_logprobs or request.topk_prompt_logprobs
        return vllm.SamplingParams(
            n=num_samples,
            max_tokens=params.max_tokens or self.facts.context_length - len(request.prompt),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            seed=params.seed,
            stop=strings,
            stop_token_ids=token_ids,
            ignore_eos=params.stop == [],
            logprobs=0,
            prompt_logprobs=request.topk_prompt_logprobs if wants_prompt else None,
            detokenize=bool(strings),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _failed(error: EngineDeadError) -> ReplicaFailedError:
    return ReplicaFailedError(f"vLLM's engine has ended: {error}")


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
        "disable_log_stats": True,
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


def _split_stop(params: SamplingParams) -> tuple[list[str], list[int]]:
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    return [item for item in stop if isinstance(item, str)], [item for item in stop if isinstance(item, int)]


def _sequence(output: Any) -> SampledSequence:
    tokens = list(output.token_ids)
    return SampledSequence(
        tokens=tokens,
        # A missing logprob is a KeyError here: better than a number that was never computed.
        logprobs=[position[token].logprob for token, position in zip(tokens, output.logprobs, strict=True)],
        stop_reason="stop" if output.finish_reason == "stop" else "length",
    )


def _prompt_logprobs(final: Any) -> list[float | None]:
    pairs = zip(final.prompt_token_ids, final.prompt_logprobs, strict=True)
    return [None if position is None else position[token].logprob for token, position in pairs]


def _topk(final: Any, k: int) -> list[list[tuple[int, float]] | None]:
    """vLLM adds the prompt's own token to the k best where it is not among them; it is left out here."""
    return [
        None
        if position is None
        else sorted(((token, entry.logprob) for token, entry in position.items()), key=lambda pair: -pair[1])[:k]
        for position in final.prompt_logprobs
    ]
