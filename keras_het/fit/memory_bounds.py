"""Shares that were too large for a device's memory, remembered across restarts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_het.fit.session import Batches, StepFunction
from keras_het.value_types import Nest


class MemoryBounds:
    """Largest shares that fit, in one small file per replica.

    TensorFlow cannot continue after one replica of a collective has failed, so training must be
    restarted; it then finds the bound.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def read(self) -> dict[int, int]:
        """Return the known bounds: replica to its largest share."""
        bounds = {}
        for path in sorted(self._directory.glob("replica-*.json")):
            known = json.loads(path.read_text())
            bounds[int(known["replica"])] = int(known["max_share"])
        return bounds

    def write(self, replica: int, samples: int) -> None:
        """Remember the largest share of a replica."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"replica-{replica}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"replica": replica, "max_share": samples}) + "\n")
        temporary.replace(path)


def largest_share_that_fits(
    replica: int, failed: int, measurements: Sequence[Mapping[str, Any]]
) -> int:
    """Return the largest share below `failed` that a replica has computed, else half of it."""
    fitted = [row["shares"][replica] for row in measurements]
    return max((share for share in fitted if share < failed), default=0) or failed // 2


def replicas_without_memory(message: str, devices: Sequence[str], first: int) -> list[int]:
    """Return the local replicas that an error concerns."""
    named = {match.lower() for match in re.findall(r"device:([A-Za-z]+:\d+)", message)}
    hit = [
        first + index
        for index, device in enumerate(devices)
        if device.rsplit("device:", 1)[-1].lower() in named
    ]
    return hit or [first + index for index in range(len(devices))]


def note_out_of_memory(note: Callable[[str], str], step: StepFunction, batches: Batches) -> Nest:
    """Report to a callback when memory runs out, as a layer around the steps of `fit`."""
    try:
        return step(batches)
    except tf.errors.ResourceExhaustedError as error:
        advice = note(str(error))
        raise tf.errors.ResourceExhaustedError(
            error.node_def, error.op, f"{error.message}\n{advice}"
        ) from error
