"""The entrance: connects to Ray and creates sessions."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import ray
from ray.exceptions import RayActorError

from raysessions.actors.placement import NAMESPACE, RESTARTED, light_actor
from raysessions.actors.protocol import ModelFacts
from raysessions.actors.session_manager import DriverAnchor, SessionManager, anchor_name
from raysessions.checkpoint_catalogue import CheckpointCatalogue
from raysessions.cluster import connect, is_local, warn_of_unshared_storage
from raysessions.cluster_overview import ClusterOverview
from raysessions.config import LoraConfig
from raysessions.deployments import Deployments
from raysessions.errors import ConfigError
from raysessions.future import APIFuture
from raysessions.operations import StartingPoint
from raysessions.peft_folder import read_folder
from raysessions.responses import CheckpointInfo
from raysessions.sampling_client import SamplingClient, open_sampling_client
from raysessions.session_starter import SessionStarter, session_request
from raysessions.settings import Settings, SettingsKeywords
from raysessions.storage_location import StoredUri
from raysessions.training_client import TrainingClient
from raysessions.uris import SCHEME, VersionUri, new_token

MANAGER = "raysessions-manager"


class ServiceClient(CheckpointCatalogue, ClusterOverview, Deployments):
    """A driver's connection. What it created ends with it: at `close()`, or when the process ends in any way."""

    def __init__(self, address: str | None = None, **settings: Unpack[SettingsKeywords]) -> None:
        """
        Args:
            address: None for the Ray cluster this process is connected to, else `RAY_ADDRESS`, else a local Ray started
                for you; or "auto", or "HOST:PORT". Not "ray://…" (Ray Client): use `ray job submit` from outside the cluster.
            settings: defaults for what this client creates, as `Settings` explains them; each is a keyword of every `create_*`
                too, which then comes first.
        """
        self._settings = Settings().but(settings)
        _ = self._settings.location  # a key that cannot be read is told now
        connect(address)
        self._settings.network.check()
        warn_of_unshared_storage(self._settings.output_uri)
        self._driver_id = secrets.token_hex(8)
        anchor = {"name": anchor_name(self._driver_id), "namespace": NAMESPACE, **RESTARTED}
        self._anchor = light_actor(DriverAnchor, **anchor).remote()
        self._manager = self._meet_manager()
        self._starter = SessionStarter(self._manager, self._driver_id)

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
        detached: bool = False,
        share: bool = True,
        timeout_s: float = 900,
        **settings: Unpack[SettingsKeywords],
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
            detached: let the session outlive this process: `attach(name)` finds it again, until `stop_session(name)` or one of
                its limits (`Settings.lease_s`) ends it.
            share: use the loaded base model of other sessions with the same configs, taking turns with them; each adds its
                adapter's memory only. False: a base model of its own.
            timeout_s: for the whole start. When it passes, what was placed is freed.
            settings: for this session instead of the client's; see `Settings`.

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
        return self._start_session(base_model, lora, None, name, detached, share, timeout_s, self._settings.but(settings))

    def create_training_client_from_state(
        self,
        path: str | Path,
        *,
        base_model: str | None = None,
        name: str | None = None,
        detached: bool = False,
        share: bool = True,
        timeout_s: float = 900,
        **settings: Unpack[SettingsKeywords],
    ) -> TrainingClient:
        """Starts a session with the weights of `path` and a fresh optimizer. Rank, alpha and layers come from there.

        Args:
            path: a saved version (`raysessions://GROUP/vN`), or a PEFT folder on this machine, made here or elsewhere.
            base_model: None for the checkpoint's own. Another one is refused, but for a PEFT folder, which does not prove its.
            name, detached, share, timeout_s, settings: as for `create_lora_training_client`.
        """
        return self._from_state(path, base_model, name, detached, share, timeout_s, settings, with_optimizer=False)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str | Path,
        *,
        base_model: str | None = None,
        name: str | None = None,
        detached: bool = False,
        share: bool = True,
        timeout_s: float = 900,
        **settings: Unpack[SettingsKeywords],
    ) -> TrainingClient:
        """Like `create_training_client_from_state`, and AdamW goes on where it was: the run continues as if it had not stopped.
        Ranks and ZeRO stage may be others than the saved run's."""
        return self._from_state(path, base_model, name, detached, share, timeout_s, settings, with_optimizer=True)

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        *,
        merged: bool = False,
        timeout_s: float = 900,
        **settings: Unpack[SettingsKeywords],
    ) -> SamplingClient:
        """A client of a version (`raysessions://GROUP/vN`), or of a base model without adapter. Exactly one of the two. Blocks
        until the samplers are ready.

        A version that a running session serves is answered by that session's samplers; another is read from the registry.

        Args:
            merged: serve the version from samplers of its own, with the adapter merged into the base model's weights: faster,
                for an evaluation or a deployment of one version. They outlive its session.
            timeout_s: for the whole start.
            settings: for samplers that are started for this client; see `Settings`.
        """
        if (model_path is None) == (base_model is None):
            raise ConfigError("Give exactly one of model_path and base_model.")
        own = self._settings.but(settings)
        if base_model is not None:
            if merged:
                raise ConfigError("merged=True needs model_path: a base model has no adapter to merge.")
            return self._starter.start_sampler(base_model, own.sampling.for_rank(1), None, own, timeout_s, merged=False)
        uri = StoredUri(VersionUri.parse(str(model_path)), own.location)
        if merged:
            return self._starter.start_sampler("", own.sampling.for_rank(1), uri, own, timeout_s, merged=True)
        live: tuple[Any, str] | None = APIFuture(self._manager.find_live.remote(uri)).result()
        if live is None:
            info = self._info_of(uri.uri, own)
            return self._starter.start_sampler(
                info.base_model, own.sampling.for_rank(info.rank), uri, own, timeout_s, merged=False
            )
        if settings.get("sampling") is not None:
            raise ConfigError("sampling is the session's, which serves this version: leave it out, or give merged=True.")
        pool, session_id = live
        facts: ModelFacts = APIFuture(pool.start.remote()).result(timeout_s)
        return open_sampling_client(
            pool, uri, session_id=session_id, vocab_size=facts.vocab_size, context_length=facts.context_length
        )

    def attach(self, name: str, *, timeout_s: float = 900) -> TrainingClient:
        """A client of a session that was created with `detached=True`, from any process. It goes on behind the operations that
        were sent before; an earlier client of the session cannot send any more.

        Raises `SessionStoppedError` or `SessionExpiredError`, saying why, when the session has ended.
        """
        attached: Any = APIFuture(self._manager.attach.remote(name)).result(timeout_s)
        host, pool, info, location, lease_s = attached
        client_id = new_token()
        last_seq: int = APIFuture(host.take_over.remote(name, client_id)).result(timeout_s)
        return TrainingClient(
            self._manager, host, pool, info, location,
            timeout_s=timeout_s, lease_s=lease_s, client_id=client_id, last_seq=last_seq,
        )  # fmt: skip

    def close(self) -> None:
        """Stops all that this client created. Safe to call again."""
        with contextlib.suppress(RayActorError):  # the manager has ended already, and then so has all else
            ray.get(self._manager.disconnect.remote(self._driver_id))
            ray.get(self._manager.leave.options(max_task_retries=0).remote())  # does not return if it does

    def _info_of(self, uri: VersionUri, settings: Settings) -> CheckpointInfo:
        return APIFuture(self._manager.get_checkpoint.remote(settings.location, uri)).result()

    def _from_state(
        self,
        path: str | Path,
        base_model: str | None,
        name: str | None,
        detached: bool,
        share: bool,
        timeout_s: float,
        settings: SettingsKeywords,
        *,
        with_optimizer: bool,
    ) -> TrainingClient:
        own = self._settings.but(settings)
        if str(path).startswith(SCHEME):
            uri = VersionUri.parse(str(path))
            info = self._info_of(uri, own)
            lora = LoraConfig(
                rank=info.rank, alpha=info.alpha, seed=secrets.randbits(31), target_modules=tuple(info.target_modules)
            )
            start = StartingPoint(uri, None, with_optimizer)
            return self._start_session(base_model or info.base_model, lora, start, name, detached, share, timeout_s, own)
        folder = read_folder(path, with_optimizer=with_optimizer)
        chosen = base_model or folder.base_model
        if chosen is None:
            raise ConfigError(f"{path} does not name its base model: give base_model.")
        start = StartingPoint(None, (ray.put(folder.state),), with_optimizer)
        return self._start_session(chosen, folder.lora, start, name, detached, share, timeout_s, own)

    def _start_session(
        self,
        base_model: str,
        lora: LoraConfig,
        start: StartingPoint | None,
        name: str | None,
        detached: bool,
        share: bool,
        timeout_s: float,
        settings: Settings,
    ) -> TrainingClient:
        settings.network.check()
        if detached and is_local():
            raise ConfigError(
                "detached=True: this Ray was started for this process and ends with it. Start a cluster (`ray start --head`) "
                "and give "
                "address='auto'."
            )
        request = session_request(base_model, lora, start, name, settings, detached=detached, share=share)
        return self._starter.start_session(request, timeout_s)

    def _meet_manager(self) -> Any:
        """The cluster's manager, created if there is none. One that is just leaving is replaced by the next."""
        for attempt in range(3):
            manager = light_actor(
                SessionManager, name=MANAGER, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, **RESTARTED
            ).remote()
            try:
                ray.get(manager.connect.remote(self._driver_id))
                return manager
            except RayActorError:
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def __repr__(self) -> str:
        where = "a local Ray" if is_local() else ray.get_runtime_context().gcs_address
        return f"ServiceClient({where}, tenant {self._settings.tenant}, group {self._settings.model_package_group})"

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
