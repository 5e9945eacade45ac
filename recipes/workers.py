"""Start of a recipe's workers on this machine, and display of the chief's output."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from keras_het.launch.local.failure_report import describe_failures
from keras_het.launch.local.local_cluster import LocalCluster
from keras_het.launch.local.worker_environment import Emulation
from keras_het.launch.local.worker_process import OutputLine

ENVIRONMENT = {
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # Emulated devices are slower than this machine's processor; a GPU would only start slowly.
    "CUDA_VISIBLE_DEVICES": "",
}
TIMEOUT_SECONDS = 300

# Numbers and weights of one training.
Results = tuple[dict[str, Any], list[np.ndarray]]


def run_workers(
    console: Console,
    script: Path,
    arguments: Sequence[str],
    emulation: Emulation | None,
    names: Sequence[str],
    num_async_workers: int = 0,
) -> list[Results]:
    """Run a script as several workers, or alone without an emulation.

    Args:
        console: destination of the chief's output.
        script: the workers' script; it gets `--directory` for `save`.
        arguments: additional arguments of the script.
        emulation: devices of the workers.
        names: names under which the chief saves results.
        num_async_workers: how many of the workers, the last ones, train outside of the sync group.

    Returns:
        The results saved under these names.
    """

    def show(worker_index: int, stream: str, line: OutputLine) -> None:
        if worker_index == 0 and stream == "stdout" and line.is_final and line.text.strip():
            console.print(f"  {line.text}", highlight=False, markup=False, soft_wrap=True)

    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(script), "--directory", directory, *arguments]
        cluster = LocalCluster(
            command,
            num_async_workers=num_async_workers,
            emulation=emulation,
            env=ENVIRONMENT,
            on_line=show,
            keep_lines=200,
        )
        # Leaving the block ends all workers, even after Ctrl-C.
        with cluster:
            results = cluster.wait(timeout=TIMEOUT_SECONDS)
        if any(result.has_failed for result in results):
            sys.exit(describe_failures(results))
        return [_load(Path(directory), name) for name in names]


def save(directory: Path, name: str, numbers: dict[str, Any], weights: list[np.ndarray]) -> None:
    """Save the results of a training; for the chief."""
    np.savez(directory / f"{name}.npz", *weights)
    (directory / f"{name}.json").write_text(json.dumps(numbers))


def _load(directory: Path, name: str) -> Results:
    numbers = json.loads((directory / f"{name}.json").read_text())
    with np.load(directory / f"{name}.npz") as arrays:
        return numbers, [arrays[key] for key in arrays.files]


def largest_difference(weights: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """Return the largest absolute difference between two lists of weights."""
    pairs = zip(weights, reference, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)
