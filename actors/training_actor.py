"""One training rank: a process with one engine. A line to the engine for each call."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import numpy as np
import ray

from raysessions.actors.protocol import AdapterFacts, Address, LossResult, ModelFacts, RankState, Seat
from raysessions.actors.threads import limit_threads
from raysessions.adapter_weights import AdapterWeights
from raysessions.batch import Batch
from raysessions.config import LoraConfig, TrainingConfig
from raysessions.models import local_folder
from raysessions.training_state import TrainingState
from raysessions.types import AdamParams

if TYPE_CHECKING:
    from raysessions.actors.protocol import TrainingEngine
    from raysessions.operations import LossOp


class TrainingActor:
    """Calls run one at a time, in the order in which the ModelHost sent them."""

    _engine: TrainingEngine

    def __init__(self, base_model: str, config: TrainingConfig) -> None:
        self._base_model = base_model
        self._config = config

    def ping(self) -> None:
        """Answers once the process has a place."""

    def address(self) -> Address:
        """Where this process runs, and a port that is free there."""
        return Address(ray.util.get_node_ip_address(), _free_port())

    def load(self, seat: Seat) -> ModelFacts:
        """Returns when every rank of the group has loaded its part: they meet on the way."""
        num_threads = limit_threads(self._config.num_threads, shared_by=seat.local_size)
        import torch

        from raysessions.actors.engines.deepspeed import DeepSpeedEngine

        torch.set_num_threads(num_threads)
        self._engine = DeepSpeedEngine(local_folder(self._base_model), self._config, seat)
        return self._engine.facts

    def add_session(self, session_id: str, lora: LoraConfig) -> AdapterFacts:
        return self._engine.add_session(session_id, lora)

    def remove_session(self, session_id: str) -> None:
        self._engine.remove_session(session_id)

    def run_loss(self, session_id: str, op: LossOp) -> LossResult:
        batch = op.batch if isinstance(op.batch, Batch) else ray.get(op.batch[0])
        return self._engine.run_loss(session_id, batch, op.loss, backward=op.backward)

    def optim_step(self, session_id: str, adam: AdamParams) -> dict[str, float]:
        return self._engine.optim_step(session_id, adam)

    @ray.method(num_returns=2)
    def export_adapter(self, session_id: str) -> tuple[AdapterWeights, int]:
        """The weights, and after how many steps: small, so that who only hands the weights on learns that they are there."""
        return self._engine.export_adapter(session_id), self._engine.num_steps(session_id)

    def export_state(self, session_id: str) -> RankState:
        return self._engine.export_state(session_id)

    def load_state(self, session_id: str, state: TrainingState, gradient: np.ndarray | None) -> None:
        self._engine.load_state(session_id, state, gradient)

    def release_memory(self) -> None:
        self._engine.release_memory()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
