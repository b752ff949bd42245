"""The entrance: connects to Ray and creates sessions."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayActorError

from raysessions.actors.placement import light_actor
from raysessions.actors.session_manager import DriverAnchor, SessionManager
from raysessions.cluster import connect
from raysessions.config import LoraConfig, SamplingConfig, TrainingConfig
from raysessions.errors import ConfigError, SamplerExpiredError
from raysessions.future import APIFuture
from raysessions.models import CATALOGUE
from raysessions.operations import SessionRequest
from raysessions.progress import wait_with_progress
from raysessions.sampling_client import SamplingClient, open_sampling_client
from raysessions.training_client import TrainingClient
from raysessions.uris import VersionUri, check_name, new_session_id

MANAGER = "raysessions-manager"
NAMESPACE = "raysessions"


class ServiceClient:
    """A driver's connection. What it created ends with it: at `close()`, or when the process ends in any way."""

    def __init__(
        self,
        address: str | None = None,
        *,
        output_uri: str | None = None,
        training: TrainingConfig | None = None,
        sampling: SamplingConfig | None = None,
    ) -> None:
        """
        Args:
            address: None for the Ray cluster this process is connected to, else `RAY_ADDRESS`, else a local Ray started
                for you; or "auto", "HOST:PORT", "ray://HOST:PORT".
            output_uri: where versions are kept: a folder that the cluster's nodes see, or a URI that pyarrow knows (s3, gs,
                hdfs, file). None: `$RAYSESSIONS_HOME/versions` or `~/.raysessions/versions` on the cluster.
            training: default settings of the sessions' training actors.
            sampling: default settings of the sessions' samplers.
        """
        connect(address)
        self._output_uri = output_uri
        self._training = training or TrainingConfig()
        self._sampling = sampling or SamplingConfig()
        self._driver_id = secrets.token_hex(8)
        self._anchor = light_actor(DriverAnchor).remote()
        self._manager = self._meet_manager()

    def create_lora_training_client(
        self,
        base_model: str,
        *,
        rank: int = 32,
        alpha: float = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = False,
        target_modules: Sequence[str] | None = None,
        name: str | None = None,
        share: bool = True,
        training: TrainingConfig | None = None,
        sampling: SamplingConfig | None = None,
        timeout_s: float = 900,
    ) -> TrainingClient:
        """Starts a training session and blocks until it is ready, telling on stderr what it waits for.

        Args:
            base_model: a folder, a Hugging Face id, or a catalogue name (`list_base_models()`).
            rank: of the LoRA matrices, 1…512.
            alpha: LoRA's scale is alpha / rank. Fixed at 32, the best learning rate hardly depends on the rank
                (Schulman et al. 2025, "LoRA Without Regret").
            seed: of the adapter's initial weights; None draws one (`get_info().seed`).
            train_mlp: adapt the linear layers of the MLPs.
            train_attn: adapt the linear layers of the attention blocks.
            train_unembed: adapting the output layer is not supported; True is refused.
            target_modules: names of the layers to adapt, instead of train_mlp and train_attn.
            name: of the session, unique in the cluster; None makes one up.
            share: use the loaded base model of other sessions with the same configs, taking turns with them; each adds its
                adapter's memory only. False: a base model of its own.
            training, sampling: settings for this session instead of the service's.
            timeout_s: for the whole start. When it passes, what was placed is freed.

        A failure or Ctrl-C frees what was placed.
        """
        if train_unembed:
            raise ConfigError("train_unembed=True: the samplers cannot serve an adapter of the output layer. Leave it False.")
        lora = LoraConfig(
            rank=rank,
            alpha=alpha,
            seed=secrets.randbits(31) if seed is None else seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            target_modules=None if target_modules is None else tuple(target_modules),
        )
        request = SessionRequest(
            session_id=new_session_id() if name is None else check_name(name),
            token=secrets.token_hex(8),
            base_model=base_model,
            lora=lora,
            share=share,
            training=training or self._training,
            sampling=(sampling or self._sampling).for_rank(rank),
            output_uri=self._output_uri,
        )
        created = self._manager.create_session.remote(self._driver_id, request)
        host, pool, info = self._await_start(created, base_model, request.session_id, request.token, timeout_s)
        return TrainingClient(self._manager, host, pool, info, timeout_s=timeout_s)

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        *,
        merged: bool = False,
        sampling: SamplingConfig | None = None,
        timeout_s: float = 900,
    ) -> SamplingClient:
        """A client of a live version (`raysessions://SESSION/vN`), or of a base model without adapter. Exactly one of the
        two. Blocks until the samplers are ready.

        Args:
            merged: serve the version from samplers of its own, with the adapter merged into the base model's weights: faster,
                for an evaluation or a deployment of one version. They outlive its session.
            sampling: settings of samplers that are started for this client; None for those of the version's session, or the
                service's. Without `merged` a version is served by its session's samplers, and this is refused.
            timeout_s: for the whole start.
        """
        if (model_path is None) == (base_model is None):
            raise ConfigError("Give exactly one of model_path and base_model.")
        session_id, token = new_session_id("sampler"), secrets.token_hex(8)
        if base_model is not None:
            if merged:
                raise ConfigError("merged=True needs model_path: a base model has no adapter to merge.")
            config = (sampling or self._sampling).for_rank(1)
            created = self._manager.create_sampler.remote(
                self._driver_id, session_id, token, base_model, config, self._output_uri
            )
            pool, facts = self._await_start(created, f"sampler of {base_model}", session_id, token, timeout_s)
            return open_sampling_client(pool, None, vocab_size=facts.vocab_size, context_length=facts.context_length)
        uri = VersionUri.parse(str(model_path))
        if merged:
            created = self._manager.create_merged_sampler.remote(self._driver_id, session_id, token, uri, sampling)
            pool, facts = self._await_start(created, f"merged sampler of {uri}", session_id, token, timeout_s)
            return SamplingClient(pool, uri, None, vocab_size=facts.vocab_size, context_length=facts.context_length)
        if sampling is not None:
            raise ConfigError("sampling is the session's, which serves this version: leave it out, or give merged=True.")
        pool = ray.get(self._manager.get_pool.remote(uri.session_id))
        if pool is None:
            raise SamplerExpiredError(f"{uri} is not live: its session has ended.")
        facts = APIFuture(pool.start.remote()).result(timeout_s)
        return open_sampling_client(pool, uri, vocab_size=facts.vocab_size, context_length=facts.context_length)

    def scale_samplers(self, num_replicas: int, *, timeout_s: float = 900) -> None:
        """Changes how many replicas serve this client's sessions, while they run. Blocks until it is so: a new replica gets
        every live version before it takes requests, one that leaves finishes those it has.

        Raises `PlacementError` when the cluster has no room; the samplers of that base model are then as many as before.
        """
        if not isinstance(num_replicas, int) or num_replicas < 1:
            raise ConfigError(f"num_replicas is {num_replicas!r}: give at least 1. Sessions end with stop().")
        APIFuture(self._manager.scale_samplers.remote(self._driver_id, num_replicas)).result(timeout_s)

    def list_base_models(self) -> list[str]:
        """The catalogue's names. Folders and Hugging Face ids are base models too."""
        return sorted(CATALOGUE)

    def close(self) -> None:
        """Stops all that this client created. Safe to call again."""
        with contextlib.suppress(RayActorError):  # the manager has ended already, and then so has all else
            ray.get(self._manager.disconnect.remote(self._driver_id))

    def _await_start(self, created: ray.ObjectRef, what: str, session_id: str, token: str, timeout_s: float) -> Any:
        try:
            return wait_with_progress(created, what, lambda: self._manager.phase.remote(session_id), timeout_s)
        except BaseException:  # a time-out or Ctrl-C; after an error of its own the manager has nothing left to stop
            ray.get(self._manager.give_up.remote(session_id, token))
            raise

    def _meet_manager(self) -> Any:
        """The cluster's manager, created if there is none. One that is just leaving is replaced by the next."""
        for attempt in range(3):
            manager = light_actor(
                SessionManager, name=MANAGER, namespace=NAMESPACE, lifetime="detached", get_if_exists=True
            ).remote()
            try:
                ray.get(manager.connect.remote(self._driver_id, self._anchor))
                return manager
            except RayActorError:
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
