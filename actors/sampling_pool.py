"""The samplers of one base model: which adapter versions are live, and who answers a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import ray

from raysessions.actors.deadline import within
from raysessions.actors.live_versions import LiveVersions, call
from raysessions.actors.phases import SamplingPhases
from raysessions.actors.protocol import ModelFacts, OpenAiPart, PoolStatus, ReplicaFailedError, TokenCount
from raysessions.actors.sampling_queue import RequestQueue, Ticket
from raysessions.actors.sampling_replica import Replica
from raysessions.actors.sampling_replicas import ReplicaSet
from raysessions.actors.sampling_router import blocks_of, choose
from raysessions.actors.sampling_versions import Version
from raysessions.actors.saved_versions import SavedVersions
from raysessions.actors.usage_meter import ActivityReport, UsageMeter
from raysessions.adapter_weights import AdapterWeights
from raysessions.config import SamplingConfig
from raysessions.errors import RequestTimeoutError, SamplingPoolError
from raysessions.models import local_folder, tokenizer_files
from raysessions.operations import OpenAiRequest, SampleRequest
from raysessions.storage_location import StoredUri
from raysessions.types import SampleResponse, SamplingParams
from raysessions.usage import Usage

TURN_S = 0.5
"""How long a version may wait for a slot in the engines' batches before another has to let its requests run out."""
MAX_ATTEMPTS = 3
"""Replicas that may fail under one request before it is held to be the cause."""


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
        self._queue: RequestQueue[Replica] = RequestQueue(config.max_queued_requests)
        self._replicas = ReplicaSet(
            base_model,
            config,
            None if merged is None else (ray.put(merged[1]),),
            saved.read_copy,
            prepare=self._live.bind_all,
            changed=self._dispatch,
            ruined=self._fail,
        )
        self._live.replicas = self._replicas
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

    async def load(self, uri: StoredUri) -> tuple[ray.ObjectRef]:
        """Makes a saved version live, for as long as anybody holds the object returned. Raises `SamplerExpiredError` when it is
        neither live nor saved."""
        return await self._live.load(uri)

    async def sample(self, client_id: str, session_id: str, uri: StoredUri | None, request: SampleRequest) -> SampleResponse:
        """Samples from the version `uri`, or from the base model, on `session_id`'s account. Raises `SamplerExpiredError` once
        it is retired, `BackPressureError` when too many wait, `RequestTimeoutError` when its time is over."""
        self._meter.touch(session_id)
        await self.start()
        version = None if uri is None or uri == self._merged_uri else await self._live.get(uri)
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                response = await self._sample(client_id, version, request)
        except TimeoutError as error:
            raise self._too_late() from error
        num_tokens = sum(len(sequence.tokens) for sequence in response.sequences)
        self._meter.add(session_id, Usage(sample_requests=1, prefilled_tokens=len(request.prompt), sampled_tokens=num_tokens))
        return response

    async def answer(
        self, client_id: str, session_id: str, uri: StoredUri | None, request: OpenAiRequest
    ) -> AsyncIterator[OpenAiPart]:
        """OpenAI's API on the version `uri`, or the base model, in parts as they come. Raises as `sample` does; a replica that
        fails is replaced by another until the first part is out."""
        self._meter.touch(session_id)
        await self.start()
        version = None if uri is None or uri == self._merged_uri else await self._live.get(uri)
        ticket = self._ticket(client_id, version, request, request.num_tokens, request.text)
        try:
            async for part in within(self._config.request_timeout_s, self._answer(ticket)):
                if isinstance(part, TokenCount):
                    usage = Usage(sample_requests=1, prefilled_tokens=part.prompt, sampled_tokens=part.sampled)
                    self._meter.add(session_id, usage)
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

    async def weights(self, uri: StoredUri) -> tuple[str, tuple[ray.ObjectRef]]:
        """Of a live version: its base model, and an AdapterWeights."""
        return self._base_model, self._live.weights(uri)

    async def drop_session(self, session_id: str) -> None:
        self._live.drop_session(session_id)
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
        self._dispatch()

    async def status(self) -> PoolStatus:
        return PoolStatus(len(self._queue), len(self._live), [replica.status() for replica in self._replicas.serving])

    async def num_unfinished(self) -> int:
        """Requests that the engines themselves have."""
        return sum(await asyncio.gather(*(replica.num_unfinished() for replica in self._replicas.serving)))

    async def tokenizer_files(self) -> dict[str, bytes]:
        return tokenizer_files(local_folder(self._base_model))

    async def stop(self) -> None:
        """Ends the replicas and their engines' processes; what waits fails."""
        if self._starting is not None:
            self._starting.cancel()
        self._queue.fail(SamplingPoolError("The samplers were stopped."))
        await self._replicas.stop()

    async def _start(self) -> None:
        await asyncio.to_thread(local_folder, self._base_model)  # an unknown model fails before anything is placed
        await self._replicas.scale(self._config.num_replicas)

    async def _sample(self, client_id: str, version: Version | None, request: SampleRequest) -> SampleResponse:
        new_tokens = request.params.max_tokens or self._replicas.facts.context_length - len(request.prompt)
        num_tokens = len(request.prompt) + request.num_samples * new_tokens
        ticket = self._ticket(client_id, version, request, num_tokens, request.prompt)
        self._queue.put(ticket)
        while True:
            replica = await self._placed(ticket)
            try:
                return await replica.sample(ticket)
            except ReplicaFailedError as error:
                self._put_back(ticket, error)
            finally:
                self._release(replica, ticket)

    async def _answer(self, ticket: Ticket[Replica]) -> AsyncGenerator[OpenAiPart, None]:
        self._queue.put(ticket)
        while True:
            replica, has_begun = await self._placed(ticket), False
            try:
                async for part in replica.answer(ticket):
                    has_begun = True
                    yield part
                return
            except ReplicaFailedError as error:
                if has_begun:
                    raise SamplingPoolError(
                        f"The sampler replica failed in the middle of its answer: ask again. {error}"
                    ) from error
                self._put_back(ticket, error)
            finally:
                self._release(replica, ticket)

    def _ticket(
        self,
        client_id: str,
        version: Version | None,
        request: SampleRequest | OpenAiRequest,
        num_tokens: int,
        prompt: Sequence[int],
    ) -> Ticket[Replica]:
        blocks = blocks_of(prompt, None if version is None else version.adapter_id)
        return Ticket(client_id, version, request, num_tokens, blocks)

    def _put_back(self, ticket: Ticket[Replica], error: ReplicaFailedError) -> None:
        """Its replica failed under the request: another will have it. Raises `SamplingPoolError` when too many have."""
        ticket.failures += 1
        if ticket.failures == MAX_ATTEMPTS:
            raise SamplingPoolError(
                f"{MAX_ATTEMPTS} sampler replicas failed under this request, so it was given up. The last one: {error}"
            ) from error
        self._queue.put_back(ticket)

    async def _placed(self, ticket: Ticket[Replica]) -> Replica:
        """Waits for a replica with room."""
        self._dispatch()
        try:
            return await asyncio.shield(ticket.placed)
        except asyncio.CancelledError:
            self._queue.remove(ticket)
            if ticket.placed.done() and not ticket.placed.exception():
                self._release(ticket.placed.result(), ticket)
            raise

    def _release(self, replica: Replica, ticket: Ticket[Replica]) -> None:
        replica.release(ticket)
        if ticket.version is not None and ticket.version.is_retired:
            self._live.free_retired()
        self._dispatch()

    def _dispatch(self) -> None:
        """Gives a replica to every request that can have one."""
        while self._queue.place(self._choose):
            pass

    def _choose(self, ticket: Ticket[Replica]) -> Replica | None:
        if not self._phases.may_sample:
            return None
        with_room = [replica for replica in self._replicas.serving if replica.has_room()]
        if admitting := [replica for replica in with_room if replica.admits(ticket.adapter_id)]:
            replica = choose(admitting, ticket.blocks)
            replica.reserve(ticket)
            return replica
        if with_room and ticket.waited_s > TURN_S and not any(replica.is_making_a_slot for replica in with_room):
            min(with_room, key=lambda replica: replica.outstanding_tokens).make_a_slot()
        return None

    def _too_late(self) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"No answer within {self._config.request_timeout_s:g} s; the sample was given up. Lower max_tokens, add replicas "
            "(service.scale_samplers), or raise SamplingConfig.request_timeout_s."
        )

    def _fail(self, error: SamplingPoolError) -> None:
        """No replica is left: what waits fails, and the next request starts the pool again."""
        self._starting = None
        self._queue.fail(error)


async def _rest(replica: Replica) -> None:
    await replica.idle()
    await call(replica, replica.sleep)
