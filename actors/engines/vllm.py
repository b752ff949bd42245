"""The sampling engine: vLLM's AsyncLLM, with adapters that come and go while it generates."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import psutil
import vllm
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from raysessions.actors.engines import cpu_kernels, vllm_plugin
from raysessions.actors.engines.adapter_files import AdapterFiles
from raysessions.actors.protocol import AdapterWeights, ModelFacts
from raysessions.config import SamplingConfig
from raysessions.errors import PlacementError
from raysessions.models import context_length
from raysessions.operations import SampleRequest
from raysessions.types import SampledSequence, SampleResponse, SamplingParams

GIB = 1024**3
DEFAULT_KV_CACHE_GIB = 2.0


class VllmEngine:
    """One replica: an engine process of its own, driven from one event loop."""

    def __init__(self, folder: Path, config: SamplingConfig) -> None:
        arguments = engine_arguments(folder, config)
        self._engine = AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments))
        model = self._engine.model_config
        self.facts = ModelFacts(model.get_vocab_size(), model.max_model_len, str(model.dtype).removeprefix("torch."))
        self._files = AdapterFiles()
        self._adapters: dict[int, LoRARequest] = {}
        self._request_ids = itertools.count()

    async def add_adapter(self, adapter_id: int, name: str, weights: AdapterWeights) -> int:
        """Loads the adapter; returns the number of modules it was bound to. On an error nothing stays behind."""
        request = LoRARequest(name, adapter_id, str(self._files.write(adapter_id, weights)))
        try:
            await self._engine.add_lora(request)
            (bound, *_) = await self._engine.collective_rpc("count_bound_modules", args=(adapter_id,))
        except BaseException:
            self._files.remove(adapter_id)
            raise
        self._adapters[adapter_id] = request
        return bound

    async def remove_adapter(self, adapter_id: int) -> None:
        self._adapters.pop(adapter_id, None)
        await self._engine.remove_lora(adapter_id)
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
        (final,) = [output async for output in outputs]  # FINAL_ONLY: one, when all samples have ended
        sequences = [_sequence(output) for output in sorted(final.outputs, key=lambda output: output.index)]
        return SampleResponse(
            sequences=sequences * copies,
            prompt_logprobs=_prompt_logprobs(final) if request.prompt_logprobs else None,
            topk_prompt_logprobs=_topk(final, request.topk_prompt_logprobs) if request.topk_prompt_logprobs else None,
        )

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


def engine_arguments(folder: Path, config: SamplingConfig) -> dict[str, Any]:
    """vLLM's arguments for `config` on this node. Raises `PlacementError` when the node lacks the memory."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": config.dtype_for(folder),
        "enable_lora": True,
        "max_loras": config.max_loras,
        "max_lora_rank": config.max_lora_rank,
        "max_cpu_loras": max(config.max_loras, config.max_live_versions),
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "enable_prefix_caching": True,
        "worker_extension_cls": "raysessions.actors.engines.vllm_worker.AdapterWorker",
        "disable_log_stats": True,
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
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = _cores(config.num_threads)
    elif config.gpu_memory_utilization is not None:
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


def _cores(num_threads: int | None) -> str:
    """The cores to bind to, as vLLM wants them named. Unbound, its worker keeps to one thread."""
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(str(core) for core in cores[:num_threads])


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
