"""OpenAI's API on one engine, answered by vLLM's own layer: chat templates, tools, logprobs, streaming."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.lora.request import LoRARequest
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from raysessions.actors.protocol import OpenAiHead, TokenCount
from raysessions.config import SamplingConfig
from raysessions.operations import OpenAiRequest

BASE = "base"
"""The base model's name inside the layer, where callers' names for models mean nothing."""
INTERNAL = ("kv_transfer_params", "priority", "request_id", "session_id", "vllm_xargs")
"""Fields by which vLLM's own servers talk to each other; not for callers."""


@dataclass(slots=True)
class _Asked:
    """The request at hand."""

    model: str
    """As its caller calls it."""
    adapter: LoRARequest | None
    num_prompt_tokens: int = 0
    num_sampled_tokens: int = 0


_asked: ContextVar[_Asked] = ContextVar("asked")


class OpenAiLayer:
    """Lives in the engine's process."""

    def __init__(self, engine: AsyncLLM, config: SamplingConfig) -> None:
        counted: Any = _CountedEngine(engine)
        self._models = _NamedModels(counted, [BaseModelPath(BASE, engine.model_config.model)])
        parsers = {"tool_parser": config.tool_call_parser, "enable_auto_tools": config.tool_call_parser is not None}
        reasoning_parser = config.reasoning_parser or ""
        renderer = OnlineRenderer(
            engine.model_config,
            engine.renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            reasoning_parser=reasoning_parser,
            **parsers,
        )
        chat = OpenAIServingChat(
            counted,
            self._models,
            "assistant",
            online_renderer=renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            reasoning_parser=reasoning_parser,
            **parsers,
        )
        completion = OpenAIServingCompletion(counted, self._models, online_renderer=renderer, request_logger=None)
        self._routes: dict[str, tuple[type[BaseModel], Callable[..., Awaitable[Any]]]] = {
            "chat/completions": (ChatCompletionRequest, chat.create_chat_completion),
            "completions": (CompletionRequest, completion.create_completion),
        }

    async def answer(self, request: OpenAiRequest, adapter: LoRARequest | None) -> AsyncIterator[OpenAiHead | str | TokenCount]:
        """The head of the HTTP answer, its body in one piece or as events, and what it took. Raises `EngineDeadError`."""
        asked = _Asked(request.model, adapter)
        _asked.set(asked)  # for the task that reads these answers
        reply = await self._reply(request, BASE if adapter is None else adapter.lora_name)
        if isinstance(reply, BaseModel):
            status = reply.error.code if isinstance(reply, ErrorResponse) else 200
            yield OpenAiHead(status, "application/json")
            yield reply.model_dump_json()
        else:
            yield OpenAiHead(200, "text/event-stream")
            async for event in reply:
                yield event
        yield TokenCount(asked.num_prompt_tokens, asked.num_sampled_tokens)

    async def _reply(self, request: OpenAiRequest, name: str) -> BaseModel | AsyncIterator[str]:
        kind, handle = self._routes[request.route]
        body = {key: value for key, value in request.body.items() if key not in INTERNAL}
        try:
            return await handle(kind(**{**body, "model": name}))
        except ValidationError as error:
            return create_error_response(_sentence(error))
        except EngineDeadError:
            raise
        except Exception as error:
            return create_error_response(error)


class _NamedModels(OpenAIServingModels):
    """Knows the adapter of the request at hand, and no other. Answers name the model as the caller did."""

    @property
    def lora_requests(self) -> dict[str, LoRARequest]:
        adapter = _asked.get().adapter
        return {} if adapter is None else {adapter.lora_name: adapter}

    @lora_requests.setter
    def lora_requests(self, _: dict[str, LoRARequest]) -> None:
        """vLLM's own table, which stays empty."""

    def model_name(self, lora_request: LoRARequest | None = None) -> str:
        return _asked.get().model


class _CountedEngine:
    """The engine, with the tokens of the request at hand counted."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        asked, is_first = _asked.get(), True
        async for output in self._engine.generate(*args, **kwargs):
            if is_first:
                asked.num_prompt_tokens += len(output.prompt_token_ids or ())
                is_first = False
            asked.num_sampled_tokens += sum(len(sequence.token_ids) for sequence in output.outputs)
            yield output


def _sentence(error: ValidationError) -> str:
    """What is wrong with the request, for its author."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]
