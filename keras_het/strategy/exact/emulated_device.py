"""Delay of a replica's step to the duration of an emulated device's, without burning CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from keras_het.strategy.exact.step import ExactStep
from keras_het.value_types import Leaf

if TYPE_CHECKING:
    from keras_het.planning.times.time_model import LinearTimeModel

_slowdowns: dict[int, float] = {}


def slow_down(replica: int, factor: float) -> None:
    """Slow down an emulated device of this process from its next step on."""
    if not factor > 0:
        raise ValueError(f"factor must be positive; 1 is the usual speed. Received: {factor}.")
    _slowdowns[replica] = float(factor)


def wait_until_computed(step: ExactStep, values: Sequence[Leaf]) -> list[Leaf]:
    """Delay tensors until the emulated device's compute time has passed."""
    if step.emulated_device is None or step.clock is None:
        return list(values)
    flat = tf.nest.flatten(list(values), expand_composites=True)
    step.waited = _wait(step, step.emulated_device.time_model, step.clock.start_time, flat)
    # If it has no side effect, an operation that is only waited for does not run.
    gate = tf.raw_ops.Assert(condition=step.waited >= 0, data=[step.waited])
    with tf.control_dependencies([gate]):
        delayed = [tf.identity(item) for item in flat]
    return list(tf.nest.pack_sequence_as(list(values), delayed, expand_composites=True))


def _wait(
    step: ExactStep, model: LinearTimeModel, start_time: tf.Tensor, values: Sequence[tf.Tensor]
) -> tf.Tensor:
    with tf.control_dependencies(list(values)), tf.device("CPU:0"):
        waited = tf.numpy_function(
            _sleep_until,
            [
                start_time,
                step.replica_id,
                step.samples,
                model.fixed_seconds,
                model.seconds_per_sample,
            ],
            tf.float64,
            # Stateful operations of a function run one after the other: devices of one process
            # would not be slow at the same time.
            stateful=False,
        )
    waited.set_shape([])
    return waited


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
