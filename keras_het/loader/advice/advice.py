"""Findings about a pipeline, as objects and as a table."""

from __future__ import annotations

import dataclasses
from typing import IO

from rich.console import Console
from rich.table import Table

CACHEABLE_PREFIX = "cacheable_prefix"
VECTORISABLE_MAP = "vectorisable_map"
SEQUENTIAL_INTERLEAVE = "sequential_interleave"
LATE_FILTER = "late_filter"
UNSHUFFLED_SHARDS = "unshuffled_shards"
PYTHON_FUNCTION = "python_function"


@dataclasses.dataclass(frozen=True)
class Advice:
    """One finding about a pipeline.

    Args:
        kind: kind of finding, such as "cacheable_prefix".
        stage: the operation it concerns, with its function and the location of that function.
        message: what to do, in words.
        estimated_gain: batches/s after the change over batches/s now; None if speed is not the
            point.
        is_measured: whether the changed pipeline was built and run. Otherwise, and for Python
            functions, `estimated_gain` is an upper bound.
        memory_bytes: memory that the change takes, None if none, or if unknown.
    """

    kind: str
    stage: str
    message: str
    estimated_gain: float | None = None
    is_measured: bool = False
    memory_bytes: int | None = None

    @property
    def gain_text(self) -> str:
        """The gain in words, for a table."""
        if self.estimated_gain is None:
            return "order"
        return f"{'' if self.is_measured else 'at most '}{self.estimated_gain:.1f} x"


@dataclasses.dataclass(frozen=True)
class AdviceReport:
    """Findings of `advise`.

    Args:
        advices: the findings, largest gain first.
        seconds_per_batch: time of a batch when the pipeline runs as fast as it can.
        notes: what was not examined, and why.
    """

    advices: tuple[Advice, ...]
    seconds_per_batch: float | None
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the findings."""
        return tuple(advice.kind for advice in self.advices)

    def show(self, file: IO[str] | None = None) -> None:
        """Print the findings.

        Args:
            file: where to print, the terminal by default.
        """
        console = Console(file=file)
        if self.advices:
            console.print(self._table())
        if self.seconds_per_batch is not None:
            console.print(
                f"The pipeline alone takes {self.seconds_per_batch * 1e3:.2f} ms a batch."
            )
        if not self.advices:
            console.print("Nothing to advise.")
        for note in self.notes:
            console.print(f"Note: {note}")

    def _table(self) -> Table:
        table = Table(title="Advice for the input pipeline", show_lines=True)
        table.add_column("stage", overflow="fold")
        table.add_column("gain", justify="right")
        table.add_column("memory", justify="right")
        table.add_column("what to do", overflow="fold", ratio=1)
        for advice in self.advices:
            memory = "" if advice.memory_bytes is None else size_text(advice.memory_bytes)
            table.add_row(advice.stage, advice.gain_text, memory, advice.message)
        return table


def size_text(size: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
