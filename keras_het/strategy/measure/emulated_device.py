"""Emulated devices: `keras-het run --speeds` makes a replica's step last as long as theirs would.

The replica waits without burning CPU.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from keras_het.planning.times.time_model import LinearTimeModel
from keras_het.value_types import Leaf

_logger = logging.getLogger(__name__)

KERAS_HET_EMULATED_DEVICES = "KERAS_HET_EMULATED_DEVICES"

_KEYS = ("speed", "fixed_seconds", "seconds_per_sample")
_slowdowns: dict[int, float] = {}
_EXAMPLE = '[{"speed": 4.0, "fixed_seconds": 0.0, "seconds_per_sample": 0.001}]'


@dataclass(frozen=True)
class EmulatedDevice:
    """A device that takes at least the time its time model says for each step."""

    speed: float
    time_model: LinearTimeModel

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise ValueError(
                "An emulated device needs a positive finite speed. Received: "
                f"speed={self.speed!r}. Give relative speeds such as 4, 2 and 1."
            )

    def describe(self) -> str:
        """Return one line for logs and plots that labels the device as EMULATED."""
        model = self.time_model
        fixed = f"{1000 * model.fixed_seconds:g} ms + " if model.fixed_seconds else ""
        return (
            f"EMULATED device of speed {self.speed:g}: a step takes at least "
            f"{fixed}{1000 * model.seconds_per_sample:g} ms per sample"
        )


def read_emulated_devices(
    environ: Mapping[str, str] | None = None,
) -> tuple[EmulatedDevice, ...] | None:
    text = (os.environ if environ is None else environ).get(KERAS_HET_EMULATED_DEVICES, "")
    if not text.strip():
        return None
    try:
        devices = json.loads(text)
    except json.JSONDecodeError as error:
        raise _error(
            f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}", text
        ) from error
    if not isinstance(devices, list) or not devices:
        raise _error("must be a JSON list with one object for each local replica", text)
    return tuple(_read_device(device, index, text) for index, device in enumerate(devices))


def _read_device(device: object, index: int, text: str) -> EmulatedDevice:
    if not isinstance(device, dict) or set(device) != set(_KEYS):
        raise _error(f"must hold objects with the keys {list(_KEYS)}; device {index} is not", text)
    for key in _KEYS:
        if isinstance(device[key], bool) or not isinstance(device[key], (int, float)):
            raise _error(f"must hold numbers; device {index} has {key}={device[key]!r}", text)
    try:
        model = LinearTimeModel(float(device["fixed_seconds"]), float(device["seconds_per_sample"]))
        return EmulatedDevice(float(device["speed"]), model)
    except ValueError as error:
        raise _error(f"describes device {index} wrongly: {error}", text) from error


def _error(problem: str, text: str) -> ValueError:
    return ValueError(
        f"The environment variable {KERAS_HET_EMULATED_DEVICES} {problem}. Received: {text!r}; "
        f"expected for example {_EXAMPLE}. Unset it to use the devices as they are, or let "
        "`keras-het run --speeds` set it."
    )


def warn_of_emulated_devices(
    devices: tuple[EmulatedDevice, ...] | None, num_local_replicas: int
) -> None:
    if devices is None:
        return
    if len(devices) != num_local_replicas:
        raise ValueError(
            "KERAS_HET_EMULATED_DEVICES must describe every local replica. Received: "
            f"{len(devices)} device(s); expected: {num_local_replicas}."
        )
    lines = (f"local replica {index}: {each.describe()}" for index, each in enumerate(devices))
    _logger.warning("%s", "\n".join(lines))


def warn_that_nothing_waits() -> None:
    """Warn that a custom loop does not emulate, although the launcher's label says so."""
    _logger.warning(
        "A function of one's own in strategy.run does not wait for emulated devices "
        "(KERAS_HET_EMULATED_DEVICES, `keras-het run --speeds`): only the steps of Keras, as "
        "those of fit, do. Its times say nothing about devices of different speed."
    )


def slow_down(replica: int, factor: float) -> None:
    """Slow down an emulated device of this process from its next step on."""
    if not factor > 0:
        raise ValueError(f"factor must be positive; 1 is the usual speed. Received: {factor}.")
    _slowdowns[replica] = float(factor)


def held(
    device: EmulatedDevice,
    replica_id: int,
    samples: tf.Tensor,
    start_time: tf.Tensor,
    values: Sequence[Leaf],
) -> tuple[list[Leaf], tf.Tensor]:
    """Return values when a device would have computed them, and how long that was to wait."""
    flat = tf.nest.flatten(list(values), expand_composites=True)
    model = device.time_model
    with tf.control_dependencies(flat), tf.device("CPU:0"):
        waited = tf.numpy_function(
            _sleep_until,
            [start_time, replica_id, samples, model.fixed_seconds, model.seconds_per_sample],
            tf.float64,
            # Stateful operations of a function run one after the other: devices of one process
            # would not be slow at the same time.
            stateful=False,
        )
    waited.set_shape([])
    # If it has no side effect, an operation that is only waited for does not run.
    gate = tf.raw_ops.Assert(condition=waited >= 0, data=[waited])
    with tf.control_dependencies([gate]):
        later = [tf.identity(item) for item in flat]
    return list(tf.nest.pack_sequence_as(list(values), later, expand_composites=True)), waited


def _sleep_until(
    start: np.ndarray,
    replica_id: np.ndarray,
    samples: np.ndarray,
    fixed_seconds: float,
    seconds_per_sample: float,
) -> np.float64:
    """Sleep until the emulated compute time is over; a share of zero takes no time."""
    if samples == 0:
        return np.float64(0.0)
    seconds = float(fixed_seconds) + float(samples) * float(seconds_per_sample)
    end = float(start) + seconds * _slowdowns.get(int(replica_id), 1.0)
    remaining = end - time.time()
    if remaining > 0:
        time.sleep(remaining)
    return np.float64(max(remaining, 0.0))
