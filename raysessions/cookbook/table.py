"""A table of steps that grows while a loop runs: live in a terminal, line by line in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table


class StepTable:
    """`with StepTable(columns) as table: table.add(values)`: one row a step."""

    def __init__(self, *columns: str) -> None:
        self._console = Console()
        self._is_watched = self._console.is_terminal
        self._columns = columns
        self._table = Table(*(f"{column}" for column in columns), header_style="bold", row_styles=["", "dim"])
        self._live = Live(self._table, console=self._console, auto_refresh=False)

    def __enter__(self) -> StepTable:
        if self._is_watched:
            self._live.start()
        else:
            print(" | ".join(self._columns), flush=True)
        return self

    def add(self, *values: int | float | str) -> None:
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in values]
        self._table.add_row(*cells)
        if self._is_watched:
            self._live.refresh()
        else:
            print(" | ".join(cell.rjust(len(name)) for cell, name in zip(cells, self._columns, strict=True)), flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_watched:
            self._live.stop()


class Stopwatch:
    """Seconds spent in named phases of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
