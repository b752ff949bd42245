"""A loop that may be killed at any moment and goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from raysessions import ServiceClient, TrainingClient

Row = dict[str, float]
"""What a step reports, by name."""


class ResumableRun:
    """Saves the session's state after every step, with the step's row in it, so that neither is there without the other.

    What the loop draws at random in a step must depend on the step's number alone, then a resumed run is the same run.
    """

    def __init__(self, service: ServiceClient, name: str | None, metrics: str | Path) -> None:
        """
        Args:
            name: of the run, and of its group in the registry, which must be the service's `model_package_group`. None: nothing
                is saved, and nothing resumed.
            metrics: file of the rows, a line of JSON each, step 0 first.
        """
        self._service = service
        self._name = name
        self._metrics = Path(metrics)
        self._saved: str | None = None
        """The version of the last step."""
        self.rows: list[Row] = []
        """Of the steps that are done."""

    @property
    def next_step(self) -> int:
        return len(self.rows)

    def open(self, create: Callable[[], TrainingClient]) -> TrainingClient:
        """The run's session as of its last step, or a new one from `create`."""
        last = None if self._name is None else self._service.get_latest_checkpoint("state", self._name)
        if last is None:
            training = create()
        else:
            self._saved, self.rows = last.path, json.loads(last.user_metadata["rows"])
            training = self._service.create_training_client_from_state_with_optimizer(last.path)
        self._write()
        return training

    def finish_step(self, training: TrainingClient, row: Row) -> None:
        """The step is done, and will not be done again once this has returned."""
        self.rows.append(row)
        if self._name is not None:
            metadata = {"rows": json.dumps(self.rows)}
            before, self._saved = (
                self._saved,
                training.save_state(f"step-{len(self.rows) - 1}", user_metadata=metadata).result().path,
            )
            if before is not None:
                self._service.delete_checkpoint(before)
        self._write()

    def _write(self) -> None:
        """Whole and at once, so that no row is there twice or half."""
        temporary = self._metrics.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        temporary.replace(self._metrics)
