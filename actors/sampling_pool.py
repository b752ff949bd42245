"""The samplers of one base model: which adapter versions are live, and who answers a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

import ray

from raysessions.actors.answer import answer
from raysessions.actors.placement import place_engine_actors
from raysessions.actors.protocol import ModelFacts
from raysessions.actors.sampling_actor import SamplingActor
from raysessions.config import SamplingConfig
from raysessions.errors import SamplerExpiredError, SamplingPoolError
from raysessions.models import local_folder, tokenizer_files
from raysessions.operations import SampleRequest
from raysessions.types import SampleResponse, SamplingParams
from raysessions.uris import VersionUri

SHUTDOWN_S = 10.0
"""How long a replica may take to end its engine before it is killed."""


@dataclass(slots=True)
class _Version:
    """A live version. Its number in vLLM and its name are never used for other weights: vLLM caches prefixes by name."""

    uri: VersionUri
    adapter_id: int
    in_flight: int = 0
    retired: bool = False


class SamplingPool:
    """An async actor. A version is visible when every replica has bound it whole, and then never changes."""

    _facts: ModelFacts

    def __init__(self, base_model: str, config: SamplingConfig) -> None:
        self._base_model = base_model
        self._config = config
        self._replicas: list[Any] = []
        self._versions: dict[VersionUri, _Version] = {}
        self._adapter_ids = itertools.count(1)
        self._starting: asyncio.Task[None] | None = None
        self._phase = "placing"

    async def phase(self) -> str:
        """ "placing", "loading" or "ready"."""
        return self._phase

    async def start(self) -> ModelFacts:
        """Places and loads the replicas at the first call; later calls wait for the same start."""
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._phase = "placing"
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
        return self._facts

    async def publish(self, uri: VersionUri, weights: tuple[ray.ObjectRef], num_modules: int) -> None:
        """Makes `uri` live on every replica, or on none. Retires the session's oldest beyond max_live_versions."""
        await self.start()
        version = _Version(uri, next(self._adapter_ids))
        calls = [replica.add_adapter.remote(version.adapter_id, str(uri), weights) for replica in self._replicas]
        outcomes = await asyncio.gather(*map(_answered, calls), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not failures and all(bound == num_modules for bound in outcomes):
            self._versions[uri] = version
            await self._retire_beyond_limit(uri.session_id)
            return
        await self._remove(version)
        if failures:
            raise failures[0]
        raise SamplingPoolError(
            f"{uri}: vLLM bound {outcomes} of the adapter's {num_modules} modules, so samples would not follow the trained "
            "weights. Choose target_modules that vLLM's model supports."
        )

    async def sample(self, uri: VersionUri | None, request: SampleRequest) -> SampleResponse:
        """Samples from the version `uri`, or from the base model. Raises `SamplerExpiredError` once it is retired."""
        await self.start()
        if uri is None:
            return await _answered(self._replicas[0].sample.remote(request, None))
        version = self._versions.get(uri)
        if version is None:
            raise SamplerExpiredError(
                f"{uri} is not live: the {self._config.max_live_versions} newest versions of a session are "
                "(SamplingConfig.max_live_versions). Use a newer sampling client, or save again."
            )
        version.in_flight += 1
        try:
            return await _answered(self._replicas[0].sample.remote(request, version.adapter_id))
        finally:
            version.in_flight -= 1
            if version.retired and version.in_flight == 0:
                await self._remove(version)

    async def compute_logprobs(self, uri: VersionUri | None, prompt: list[int]) -> list[float | None]:
        """The prompt's own logprobs: a sample of one token whose prompt part is kept."""
        one_token = SamplingParams(max_tokens=1, temperature=0.0)
        response = await self.sample(uri, SampleRequest(prompt, 1, one_token, True, 0))
        return response.prompt_logprobs or []

    async def has_version(self, uri: VersionUri) -> bool:
        return uri in self._versions

    async def drop_session(self, session_id: str) -> None:
        for version in [version for version in self._versions.values() if version.uri.session_id == session_id]:
            await self._retire(version)

    async def tokenizer_files(self) -> dict[str, bytes]:
        return tokenizer_files(local_folder(self._base_model))

    async def stop(self) -> None:
        """Ends the replicas and their engines' processes."""
        if self._starting is not None:
            self._starting.cancel()
        await asyncio.gather(*map(_end, self._replicas))

    async def _start(self) -> None:
        await asyncio.to_thread(local_folder, self._base_model)
        args = (SamplingActor, self._base_model, self._config)
        placed = await place_engine_actors(*args, config=self._config, is_async=True)
        [replica] = self._replicas = placed.actors
        self._phase = "loading"
        try:
            self._facts = await _answered(replica.load.remote())
        except BaseException:
            self._replicas = []
            ray.kill(replica)
            raise
        self._phase = "ready"

    async def _retire_beyond_limit(self, session_id: str) -> None:
        live = [version for version in self._versions.values() if version.uri.session_id == session_id]
        live.sort(key=lambda version: version.uri.version)
        for version in live[: -self._config.max_live_versions]:
            await self._retire(version)

    async def _retire(self, version: _Version) -> None:
        """No new requests; the weights go when the last one has been answered."""
        del self._versions[version.uri]
        version.retired = True
        if version.in_flight == 0:
            await self._remove(version)

    async def _remove(self, version: _Version) -> None:
        calls = [replica.remove_adapter.remote(version.adapter_id) for replica in self._replicas]
        await asyncio.gather(*map(_answered, calls), return_exceptions=True)


async def _answered(ref: ray.ObjectRef) -> Any:
    return await answer(ref, if_dead=SamplingPoolError("A sampler replica died."))


async def _end(replica: Any) -> None:
    # One that hangs or is gone is killed next, and its engine's processes end with it.
    with contextlib.suppress(TimeoutError, SamplingPoolError):
        await asyncio.wait_for(_answered(replica.shutdown.remote()), SHUTDOWN_S)
    ray.kill(replica)
