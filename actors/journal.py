"""The operations that must be done again when ranks die: those since the last copy of the session's state. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from raysessions.actors.op_queue import Entry
from raysessions.operations import CustomLossOp, LoadStateOp, LossOp, Operation, OptimStepOp

MOST_OPERATIONS = 128
"""Between two copies: a gradient that adds up over more is copied on the way, so that the data of them all need not be kept."""


@dataclass(slots=True, eq=False)
class Record:
    """An operation that was sent to the ranks."""

    entry: Entry
    is_done: bool = False
    """The ranks have answered."""
    deaths: int = 0
    """How often ranks died while they had it."""

    @property
    def changes_state(self) -> bool:
        return changes_state(self.entry.op)


def changes_state(op: Operation) -> bool:
    """Of a session: its weights, its optimizer or its gradient."""
    return (isinstance(op, LossOp) and op.backward) or isinstance(op, CustomLossOp | OptimStepOp | LoadStateOp)


@dataclass(slots=True)
class Journal:
    """Of one session."""

    snapshot_every: int
    """Optimizer steps from one snapshot to the next."""
    records: list[Record] = field(default_factory=list)
    """In the order in which the ranks got them, from the copy on."""
    last_sent: int = 0
    """Sequence number of the last operation that the ranks got."""
    last_change: int = 0
    """Of the last one that changes the session's state."""
    _steps: int = 0
    _others: int = 0

    def begin(self, entry: Entry) -> Record:
        record = Record(entry)
        self.records.append(record)
        self.last_sent = entry.seq_id
        if record.changes_state:
            self.last_change = entry.seq_id
        return record

    def end(self, record: Record, *, failed: bool) -> None:
        """The ranks have answered. What changed nothing need not be done again; a step that fails drops the gradient."""
        record.is_done = True
        if record in self.records and (not record.changes_state or (failed and not isinstance(record.entry.op, OptimStepOp))):
            self.records.remove(record)

    def wants_snapshot(self, op: Operation) -> bool:
        """Called once for each operation: whether the state after it is to be copied."""
        if isinstance(op, OptimStepOp):
            self._steps += 1
            return self._steps % self.snapshot_every == 0
        self._others += 1
        return self._others % MOST_OPERATIONS == 0

    def advance(self, seq_id: int) -> None:
        """There is a copy of the state after operation `seq_id`: what led there is not needed any more."""
        self.records = [record for record in self.records if record.entry.seq_id > seq_id]

    @property
    def done(self) -> list[Record]:
        return [record for record in self.records if record.is_done]

    @property
    def pending(self) -> list[Record]:
        return [record for record in self.records if not record.is_done]
