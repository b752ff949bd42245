"""The samplers of one base model: which adapter versions are live, and who answers a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

import ray

from raysessions.actors.deadline import within
from raysessions.actors.live_versions import LiveVersions, call
from raysessions.actors.phases import SamplingPhases
from raysessions.actors.protocol import ModelFacts, OpenAiHead, OpenAiPart, PoolStatus, TokenCount
from raysessions.actors.sampling_dispatcher import Dispatcher
from raysessions.actors.sampling_queue import Ticket
from raysessions.actors.sampling_replica import Replica
from raysessions.actors.sampling_replicas import ReplicaSet
from raysessions.actors.sampling_router import blocks_of
from raysessions.actors.sampling_versions import Version
from raysessions.actors.saved_versions import SavedVersions
from raysessions.actors.usage_meter import ActivityReport, UsageMeter
from raysessions.adapter_weights import AdapterWeights
from raysessions.config import SamplingConfig
from raysessions.errors import RequestTimeoutError, SamplingPoolError, SessionStoppedError
from raysessions.models import local_folder, tokenizer_files
from raysessions.operations import NewestVersion, OpenAiRequest, SampleRequest
from raysessions.storage_location import StoredUri
from raysessions.types import SampleResponse, SamplingParams
from raysessions.uris import new_token
from raysessions.usage import Usage

T = TypeVar("T")


class SamplingPool:
    """An async actor. A version is visible when every replica has bound it whole, and then never changes."""

    def __init__(
        self,
        base_model: str,
        config: SamplingConfig,
        merged: tuple[StoredUri, AdapterWeights] | None = None,
    ) -> None:
        """
        Args:
            merged: a version to serve merged into the base model; the pool then answers from that alone.
        """
        self._base_model = base_model
        self._config = config
        saved = SavedVersions(base_model)
        self._merged_uri = None if merged is None else merged[0]
        self._meter = UsageMeter()
        self._phases = SamplingPhases()
        self._live = LiveVersions(config, saved, self._phases, self.start)
        self._dispatcher = Dispatcher(config.max_queued_requests, self._live, self._phases)
        self._newest: dict[str, StoredUri | None] = {}
        self._met: dict[str, NewestVersion] = {}
        """By session."""
        self._replicas = ReplicaSet(
            base_model,
            config,
            None if merged is None else (ray.put(merged[1]),),
            saved.read_copy,
            prepare=self._live.bind_all,
            changed=self._dispatcher.dispatch,
            ruined=self._fail,
        )
        self._live.replicas = self._dispatcher.replicas = self._replicas
        self._starting: asyncio.Task[None] | None = None

    async def phase(self) -> str:
        """ "placing", "loading" or "ready"."""
        if self._replicas.serving:
            return "ready"
        return "loading" if self._replicas.is_placed else "placing"

    async def report(self) -> ActivityReport:
        """What was sampled, and for whom."""
        width = self._config.tensor_parallel_size
        times = [replica.times() for replica in self._replicas.serving]
        busy_s, placed_s = (width * sum(column) for column in zip(*times, strict=True)) if times else (0.0, 0.0)
        return self._meter.report(await self.phase(), placed_s, busy_s)

    async def start(self) -> ModelFacts:
        """Places and loads the replicas at the first call; later calls wait for the same start."""
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
        return self._replicas.facts

    async def scale(self, num_replicas: int) -> None:
        """Returns when so many replicas serve, each with every live version."""
        await self.start()
        await self._replicas.scale(num_replicas)

    async def publish(self, uri: StoredUri, session_id: str, weights: tuple[ray.ObjectRef], num_modules: int) -> None:
        """Makes `uri` live on every replica, or on none. Safe to call again."""
        await self._live.publish(uri, session_id, weights, num_modules)
        self._newest[session_id] = uri

    async def load(self, uri: StoredUri) -> tuple[ray.ObjectRef]:
        """Makes a saved version live, for as long as anybody holds the object returned. Raises `SamplerExpiredError` when it is
        neither live nor saved."""
        return await self._live.load(uri)

    async def sample(
        self, client_id: str, session_id: str, asked: StoredUri | NewestVersion | None, request: SampleRequest
    ) -> SampleResponse:
        """Samples from the version `asked` for, None: from the base model, on `session_id`'s account. Raises
        `SamplerExpiredError` once it is retired, `BackPressureError` when too many wait, `RequestTimeoutError` when its time is
        over."""
        version = await self._version(session_id, asked)
        new_tokens = request.params.max_tokens or self._replicas.facts.context_length - len(request.prompt)
        num_tokens = len(request.prompt) + request.num_samples * new_tokens
        ticket = _ticket(client_id, version, request, num_tokens, request.prompt)
        response = await self._in_time(self._dispatcher.run(ticket, lambda replica: replica.sample(ticket)))
        sampled_tokens = sum(len(sequence.tokens) for sequence in response.sequences)
        self._count(session_id, TokenCount(len(request.prompt), sampled_tokens))
        return response

    async def answer(
        self, client_id: str, session_id: str, asked: StoredUri | NewestVersion | None, request: OpenAiRequest
    ) -> tuple[OpenAiHead, str]:
        """OpenAI's API, for an answer in one piece: its head and its body. Raises as `sample` does."""
        version = await self._version(session_id, asked)
        ticket = _ticket(client_id, version, request, request.num_tokens, request.text)
        head, body, count = await self._in_time(self._dispatcher.run(ticket, lambda replica: replica.answer_whole(ticket)))
        self._count(session_id, count)
        return head, body

    async def stream(
        self, client_id: str, session_id: str, asked: StoredUri | NewestVersion | None, request: OpenAiRequest
    ) -> AsyncIterator[OpenAiPart]:
        """OpenAI's API, for an answer in parts as they come. Raises as `sample` does; a replica that fails is replaced by
        another until the first part is out."""
        version = await self._version(session_id, asked)
        ticket = _ticket(client_id, version, request, request.num_tokens, request.text)
        try:
            async for part in within(self._config.request_timeout_s, self._dispatcher.stream(ticket)):
                if isinstance(part, TokenCount):
                    self._count(session_id, part)
                else:
                    yield part
        except TimeoutError as error:
            raise self._too_late() from error

    async def compute_logprobs(
        self, client_id: str, session_id: str, uri: StoredUri | None, prompt: list[int]
    ) -> list[float | None]:
        """The prompt's own logprobs: a sample of one token whose prompt part is kept."""
        one_token = SamplingParams(max_tokens=1, temperature=0.0)
        response = await self.sample(client_id, session_id, uri, SampleRequest(prompt, 1, one_token, True, 0))
        return response.prompt_logprobs or []

    async def session_of(self, uri: StoredUri) -> str | None:
        """The running session that a live version is of; None if it is not live, or was loaded from the registry."""
        return self._live.session_of(uri)

    async def newest(self, session_id: str) -> StoredUri | None:
        """The session's newest version that is live."""
        return self._live.newest(session_id)

    async def meet(self, session_id: str, newest: StoredUri | None) -> NewestVersion:
        """By what a running session's newest version can be asked for. `newest`: that version, for a pool whose process died
        and has forgotten."""
        self._newest.setdefault(session_id, newest)
        return self._met.setdefault(session_id, NewestVersion(new_token()))

    async def weights(self, uri: StoredUri) -> tuple[str, tuple[ray.ObjectRef]]:
        """Of a live version: its base model, and an AdapterWeights."""
        return self._base_model, self._live.weights(uri)

    async def drop_session(self, session_id: str) -> None:
        self._live.drop_session(session_id)
        self._newest.pop(session_id, None)
        self._met.pop(session_id, None)
        self._meter.forget(session_id)

    async def rest(self, host_id: str) -> None:
        """A host wants to train: returns when what was begun has been answered and the engines sleep."""
        self._phases.rest(host_id)
        async with self._phases.changing:
            await asyncio.gather(*(_rest(replica) for replica in self._replicas.serving))

    async def resume(self, host_id: str) -> None:
        """A host has nothing to train any more. The last one wakes the engines."""
        self._phases.resume(host_id)
        async with self._phases.changing:
            if not self._phases.is_training:
                await asyncio.gather(*(call(replica, replica.wake_up) for replica in self._replicas.serving))
                self._phases.awake()
        self._dispatcher.dispatch()

    async def status(self) -> PoolStatus:
        return PoolStatus(len(self._dispatcher), len(self._live), [replica.status() for replica in self._replicas.serving])

    async def num_unfinished(self) -> int:
        """Requests that the engines themselves have."""
        return sum(await asyncio.gather(*(replica.num_unfinished() for replica in self._replicas.serving)))

    async def tokenizer_files(self) -> dict[str, bytes]:
        return tokenizer_files(local_folder(self._base_model))

    async def stop(self) -> None:
        """Ends the replicas and their engines' processes; what waits fails."""
        if self._starting is not None:
            self._starting.cancel()
        self._dispatcher.fail(SamplingPoolError("The samplers were stopped."))
        await self._replicas.stop()

    async def _start(self) -> None:
        await asyncio.to_thread(local_folder, self._base_model)  # an unknown model fails before anything is placed
        await self._replicas.scale(self._config.num_replicas)

    async def _version(self, session_id: str, asked: StoredUri | NewestVersion | None) -> Version | None:
        self._meter.touch(session_id)
        await self.start()
        if isinstance(asked, NewestVersion):
            if self._met.get(session_id) != asked:
                raise SessionStoppedError(f"Session {session_id} has ended, or its samplers' process has: ask the manager.")
            asked = self._newest[session_id]
        return None if asked is None or asked == self._merged_uri else await self._live.get(asked)

    async def _in_time(self, answer: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                return await answer
        except TimeoutError as error:
            raise self._too_late() from error

    def _count(self, session_id: str, count: TokenCount) -> None:
        usage = Usage(sample_requests=1, prefilled_tokens=count.prompt, sampled_tokens=count.sampled)
        self._meter.add(session_id, usage)

    def _too_late(self) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"No answer within {self._config.request_timeout_s:g} s; the sample was given up. Lower max_tokens, add replicas "
            "(service.scale_samplers), or raise SamplingConfig.request_timeout_s."
        )

    def _fail(self, error: SamplingPoolError) -> None:
        """No replica is left: what waits fails, and the next request starts the pool again."""
        self._starting = None
        self._dispatcher.fail(error)


def _ticket(
    client_id: str,
    version: Version | None,
    request: SampleRequest | OpenAiRequest,
    num_tokens: int,
    prompt: Sequence[int],
) -> Ticket[Replica]:
    blocks = blocks_of(prompt, None if version is None else version.adapter_id)
    return Ticket(client_id, version, request, num_tokens, blocks)


async def _rest(replica: Replica) -> None:
    await replica.idle()
    await call(replica, replica.sleep)
