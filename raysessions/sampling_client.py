"""Sampling from one version of a session's weights, or from a base model."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from raysessions.errors import ConfigError
from raysessions.future import APIFuture, own_error
from raysessions.operations import NewestVersion, OpenAiRequest, SampleRequest
from raysessions.storage_location import StoredUri
from raysessions.tokenizer import load_tokenizer
from raysessions.types import ModelInput, SampleResponse, SamplingParams, as_model_input, as_typed

if TYPE_CHECKING:
    from raysessions.actors.protocol import OpenAiHead


class SamplingClient:
    """Pinned to its version for life: later saves do not move it. Picklable, so that tasks and actors can sample too."""

    def __init__(
        self,
        pool: Any,
        uri: StoredUri | NewestVersion | None,
        lease: ray.ObjectRef | None,
        *,
        session_id: str,
        vocab_size: int,
        context_length: int,
        client_id: str | None = None,
    ) -> None:
        self._pool = pool
        self._uri = uri
        self._lease = lease  # its version stays live for as long as this is held
        self._session_id = session_id  # on whose account it samples
        self._client_id = client_id or secrets.token_hex(8)  # by which the pool lets clients take turns
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._tokenizer: Any = None

    @property
    def version(self) -> str | None:
        """`raysessions://SESSION/vN`, or None for the base model."""
        return str(self._uri) if isinstance(self._uri, StoredUri) else None

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> APIFuture[SampleResponse]:
        """Samples `num_samples` continuations of `prompt`.

        Raises `ConfigError` at once when the prompt leaves no room in the context; the future raises
        `SamplerExpiredError` once this version has been retired.
        """
        if num_samples < 1:
            raise ConfigError(f"num_samples is {num_samples}: give at least 1.")
        if not 0 <= topk_prompt_logprobs <= 20:
            raise ConfigError(f"topk_prompt_logprobs is {topk_prompt_logprobs}: give 0…20.")
        params = as_typed(SamplingParams, sampling_params)
        request = SampleRequest(
            prompt=self._checked(prompt, params.max_tokens or 1),
            num_samples=num_samples,
            params=params,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        return self._send(self._pool.sample.remote(self._client_id, self._session_id, self._uri, request))

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        """The logprob of each token of `prompt` given those before it, nats; the first entry is None."""
        return self._send(
            self._pool.compute_logprobs.remote(self._client_id, self._session_id, self._uri, self._checked(prompt, 1))
        )

    async def answer(self, request: OpenAiRequest) -> tuple[OpenAiHead, str]:
        """OpenAI's API on this version, for a server: the answer's head and its body, in one piece."""
        answered = self._pool.answer.remote(self._client_id, self._session_id, self._uri, request)
        try:
            return await APIFuture(answered)
        except asyncio.CancelledError:  # its caller is gone
            ray.cancel(answered)
            raise

    async def stream(self, request: OpenAiRequest) -> AsyncGenerator[OpenAiHead | str, None]:
        """Likewise, in parts as they come. A reader who stops early cancels it."""
        parts = self._pool.stream.options(num_returns="streaming").remote(self._client_id, self._session_id, self._uri, request)
        is_over = False
        try:
            async for part in parts:
                try:
                    yield await part
                except RayError as error:
                    raise own_error(error) from error
            is_over = True
        finally:
            if not is_over:
                ray.cancel(parts)

    def get_tokenizer(self) -> Any:
        """The base model's tokenizer (transformers)."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(ray.get(self._pool.tokenizer_files.remote()))
        return self._tokenizer

    def _checked(self, prompt: Any, max_tokens: int) -> list[int]:
        tokens = as_model_input(prompt).to_ints()
        if not tokens:
            raise ConfigError("The prompt is empty: give at least one token.")
        if wrong := [token for token in tokens if not 0 <= token < self._vocab_size]:
            raise ConfigError(f"The prompt has token id {wrong[0]}; the vocabulary has {self._vocab_size}.")
        if len(tokens) + max_tokens > self._context_length:
            raise ConfigError(
                f"The prompt has {len(tokens)} tokens and asks for {max_tokens} new ones; the context is "
                f"{self._context_length}. Shorten the prompt or lower max_tokens."
            )
        return tokens

    def _send(self, ref: ray.ObjectRef) -> APIFuture[Any]:
        def cancel() -> bool:
            if ray.wait([ref], timeout=0, fetch_local=False)[0]:
                return False
            ray.cancel(ref)
            return True

        return APIFuture(ref, cancel)

    def __reduce__(self) -> tuple[Any, ...]:
        keywords = {
            "session_id": self._session_id,
            "vocab_size": self._vocab_size,
            "context_length": self._context_length,
            "client_id": self._client_id,
        }
        return (_rebuild, (self._pool, self._uri, self._lease, keywords))

    def __repr__(self) -> str:
        return f"SamplingClient({self.version or 'base model'})"


def open_sampling_client(pool: Any, uri: StoredUri | None, **keywords: Any) -> SamplingClient:
    """A client of a version, which is live for as long as the client is there. Raises `SamplerExpiredError` if it is neither
    live nor saved."""
    lease = None if uri is None else APIFuture(pool.load.remote(uri)).result()[0]
    return SamplingClient(pool, uri, lease, **keywords)


def _rebuild(pool: Any, uri: StoredUri | None, lease: ray.ObjectRef | None, keywords: dict[str, Any]) -> SamplingClient:
    return SamplingClient(pool, uri, lease, **keywords)
