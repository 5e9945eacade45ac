"""Common output of all benchmarks: a table on the terminal and flat rows in JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Table


def environment() -> dict[str, Any]:
    """Return what a reader needs to know about the machine."""
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "gpus": len(tf.config.list_physical_devices("GPU")),
        "system": platform.system(),
    }


def print_table(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Print the rows, one column per field; `columns` names those that matter most."""
    columns = columns or list(rows[0])
    table = Table()
    for name in columns:
        table.add_column(name.replace("_", " "))
    for row in rows:
        cells = [row.get(name) for name in columns]
        table.add_row(*["" if cell is None else str(cell) for cell in cells])
    # a narrower table is unreadable
    Console(width=max(Console().width, 120)).print(table)


def write_report(
    name: str, rows: Sequence[dict[str, Any]], path: Path | None, about: dict[str, Any]
) -> None:
    """Write the rows to a file, if one is given."""
    if path is not None:
        report = {"benchmark": name, "environment": about, "rows": list(rows)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")
