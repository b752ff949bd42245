"""The sampling engine: vLLM's AsyncLLM, with adapters that come and go while it generates."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import vllm
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from raysessions.actors.engines.adapter_files import AdapterFiles
from raysessions.actors.engines.merged_weights import write_merged
from raysessions.actors.engines.process_activity import active_nanoseconds, active_seconds_since, descendants, is_stopped
from raysessions.actors.engines.vllm_start import WHOLE_NODE, engine_arguments, start
from raysessions.actors.protocol import CoreShare, ModelFacts, OpenAiPart, ReplicaFailedError
from raysessions.adapter_weights import AdapterWeights
from raysessions.config import SamplingConfig
from raysessions.operations import OpenAiRequest, SampleRequest
from raysessions.types import SampledSequence, SampleResponse, SamplingParams

if TYPE_CHECKING:
    from raysessions.actors.engines.vllm_openai import OpenAiLayer

MIN_ACTIVE = 0.5
"""Share of the time that an engine on CPU which does not answer must have computed, or waited for a core, not to be stuck.
Looking for messages takes a few hundredths."""


class VllmEngine:
    """One replica: an engine process of its own, driven from one event loop."""

    def __init__(
        self, folder: Path, config: SamplingConfig, share: CoreShare = WHOLE_NODE, merged: AdapterWeights | None = None
    ) -> None:
        """With `merged`, an adapter, the engine serves the base model with that added to its weights, and no others."""
        self._config = config
        self._openai: OpenAiLayer | None = None
        with contextlib.ExitStack() as stack:
            if merged is not None:
                base, folder = folder, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raysessions-merged-")))
                write_merged(base, merged, folder)
            self._engine = start(engine_arguments(folder, config, share, with_adapters=merged is None))
            if merged is not None:
                self._openai_layer()  # now, while its model's folder is there
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

    async def answer(self, request: OpenAiRequest, adapter_id: int | None) -> AsyncIterator[OpenAiPart]:
        try:
            async for part in self._openai_layer().answer(request, None if adapter_id is None else self._adapters[adapter_id]):
                yield part
        except EngineDeadError as error:
            raise _failed(error) from error

    def _openai_layer(self) -> OpenAiLayer:
        if self._openai is None:
            from raysessions.actors.engines.vllm_openai import OpenAiLayer  # its imports take seconds

            self._openai = OpenAiLayer(self._engine, self._config)
        return self._openai

    async def check_health(self, timeout_s: float) -> None:
        before = active_nanoseconds(descendants())
        try:
            async with asyncio.timeout(timeout_s):
                await self._engine.collective_rpc("answer")
        except EngineDeadError as error:
            raise _failed(error) from error
        except TimeoutError as error:
            # It answers between two steps, and on CPU one step may take long: the first one compiles. A GPU's never do.
            active_s = active_seconds_since(before)
            computes = active_s > MIN_ACTIVE * timeout_s and not is_stopped(descendants())
            if not (computes and vllm.platforms.current_platform.is_cpu()):
                raise ReplicaFailedError(
                    f"vLLM's engine did not answer for {timeout_s:g} s, in which it computed for {active_s:.1f} s."
                ) from error

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
