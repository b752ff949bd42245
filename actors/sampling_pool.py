"""The samplers of one base model: which adapter versions are live, and who answers a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from raysessions.actors.leases import is_held, new_lease
from raysessions.actors.phases import SamplingPhases
from raysessions.actors.protocol import ModelFacts, PoolStatus, ReplicaFailedError
from raysessions.actors.sampling_queue import RequestQueue, Ticket
from raysessions.actors.sampling_replica import Replica
from raysessions.actors.sampling_replicas import ReplicaSet
from raysessions.actors.sampling_router import blocks_of, choose
from raysessions.actors.sampling_versions import Version, Versions
from raysessions.actors.saved_versions import SavedVersions
from raysessions.adapter_weights import AdapterWeights
from raysessions.config import SamplingConfig
from raysessions.errors import RequestTimeoutError, SamplingPoolError
from raysessions.models import local_folder, tokenizer_files
from raysessions.operations import SampleRequest
from raysessions.storage_location import StoredUri
from raysessions.types import SampleResponse, SamplingParams

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
        self._saved = SavedVersions(base_model)
        self._merged_uri = None if merged is None else merged[0]
        self._versions = Versions(config.max_live_versions, is_held)
        self._queue: RequestQueue[Replica] = RequestQueue(config.max_queued_requests)
        self._replicas = ReplicaSet(
            base_model,
            config,
            None if merged is None else (ray.put(merged[1]),),
            self._saved.read_copy,
            prepare=self._bind_live,
            changed=self._dispatch,
            ruined=self._fail,
        )
        self._phases = SamplingPhases()
        self._is_second_life = ray.get_runtime_context().was_current_actor_reconstructed
        self._loading = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def phase(self) -> str:
        """ "placing", "loading" or "ready"."""
        if self._replicas.serving:
            return "ready"
        return "loading" if self._replicas.is_placed else "placing"

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
        """Makes `uri` live on every replica, or on none. Retires what is too old. Safe to call again."""
        if uri not in self._versions:
            await self._make_live(self._versions.new(uri, session_id, weights, num_modules))

    async def load(self, uri: StoredUri) -> tuple[ray.ObjectRef]:
        """Makes a saved version live, from the registry unless it is live already. It is for as long as anybody holds the
        object returned. Raises `SamplerExpiredError` when it is neither."""
        async with self._loading:
            if uri not in self._versions:
                _, weights = await self._saved.read(uri)
                version = self._versions.new(uri, None, (ray.put(weights),), weights.num_modules)
                lease = self._leased(version)
                await self._make_live(version)
                return lease
        return self._leased(self._versions.get(uri))

    async def _version(self, uri: StoredUri) -> Version:
        """A live version. A pool that was started again has none, and takes from the registry what is asked for."""
        if self._is_second_life and uri not in self._versions:
            async with self._loading:
                if uri not in self._versions:
                    info, weights = await self._saved.await_copy(uri)
                    version = self._versions.new(uri, info.session_id, (ray.put(weights),), weights.num_modules)
                    await self._make_live(version)
        return self._versions.get(uri)

    async def _make_live(self, version: Version) -> None:
        bound: list[Replica] = []
        try:
            await self.start()
            await self._replicas.any_serving()
            await self._phases.wait()
            while missing := [replica for replica in self._replicas.serving if replica not in bound]:
                await asyncio.gather(*(_call(replica, replica.bind, version) for replica in missing))
                bound += missing
        except BaseException:
            self._versions.retire(version)
            self._free_retired()
            raise
        if self._versions.add(version):
            self._free_retired()

    async def sample(self, client_id: str, uri: StoredUri | None, request: SampleRequest) -> SampleResponse:
        """Samples from the version `uri`, or from the base model. Raises `SamplerExpiredError` once it is retired,
        `BackPressureError` when too many wait, `RequestTimeoutError` when its time is over."""
        await self.start()
        version = None if uri is None or uri == self._merged_uri else await self._version(uri)
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                return await self._sample(client_id, version, request)
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"No answer within {self._config.request_timeout_s:g} s; the sample was given up. Lower max_tokens, add "
                "replicas (service.scale_samplers), or raise SamplingConfig.request_timeout_s."
            ) from error

    async def compute_logprobs(self, client_id: str, uri: StoredUri | None, prompt: list[int]) -> list[float | None]:
        """The prompt's own logprobs: a sample of one token whose prompt part is kept."""
        one_token = SamplingParams(max_tokens=1, temperature=0.0)
        response = await self.sample(client_id, uri, SampleRequest(prompt, 1, one_token, True, 0))
        return response.prompt_logprobs or []

    async def is_live(self, uri: StoredUri) -> bool:
        return uri in self._versions

    async def weights(self, uri: StoredUri) -> tuple[str, tuple[ray.ObjectRef]]:
        """Of a live version: its base model, and an AdapterWeights."""
        return self._base_model, self._versions.get(uri).weights

    async def drop_session(self, session_id: str) -> None:
        for version in self._versions.of_session(session_id):
            self._versions.retire(version)
        self._free_retired()

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
                await asyncio.gather(*(_call(replica, replica.wake_up) for replica in self._replicas.serving))
                self._phases.awake()
        self._dispatch()

    async def status(self) -> PoolStatus:
        return PoolStatus(len(self._queue), len(self._versions), [replica.status() for replica in self._replicas.serving])

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
        ticket = Ticket[Replica](
            client_id,
            version,
            request,
            num_tokens=len(request.prompt) + request.num_samples * new_tokens,
            blocks=blocks_of(request.prompt, None if version is None else version.adapter_id),
        )
        self._queue.put(ticket)
        for attempt in range(MAX_ATTEMPTS):
            replica = await self._placed(ticket)
            try:
                return await replica.sample(ticket)
            except ReplicaFailedError as error:
                if attempt + 1 == MAX_ATTEMPTS:
                    raise SamplingPoolError(
                        f"{MAX_ATTEMPTS} sampler replicas failed under this request, so it was given up. The last one: {error}"
                    ) from error
                self._queue.put_back(ticket)
            finally:
                self._release(replica, ticket)
        raise AssertionError("unreachable")

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
            self._free_retired()
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

    async def _bind_live(self, replica: Replica) -> None:
        """Gives a new replica the live versions, the newest last: as many as it keeps loaded. It loads others when asked."""
        bound: set[Version] = set()
        while True:
            # It joins in a sampling phase: one that came later than `rest` would compute while others train.
            while not self._phases.may_sample:
                await self._phases.wait()
            missing = set(self._versions.newest_first()[: self._config.max_resident_loras]) - bound
            if not missing:
                return
            for version in sorted(missing, key=lambda version: version.adapter_id):
                await replica.bind(version)
            bound |= missing

    def _leased(self, version: Version) -> tuple[ray.ObjectRef]:
        lease = new_lease()
        version.leases.add(lease.binary())
        return (lease,)

    def _free_retired(self) -> None:
        for replica in self._replicas.serving:
            task = asyncio.create_task(_call(replica, replica.unbind_retired))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _fail(self, error: SamplingPoolError) -> None:
        """No replica is left: what waits fails, and the next request starts the pool again."""
        self._starting = None
        self._queue.fail(error)


async def _rest(replica: Replica) -> None:
    await replica.idle()
    await _call(replica, replica.sleep)


async def _call(replica: Replica, method: Callable[..., Awaitable[None]], *args: Any) -> None:
    """A replica that fails at it is replaced, and its successor made fit before it serves."""
    try:
        await method(*args)
    except ReplicaFailedError as error:
        replica.fail(error)
