"""Makes a replica's step take as long as an emulated device would need, without burning CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.strategy.emulated_device_config import EmulatedDevice
from keras_het.strategy.exact_step import ExactStep


def start_clock(step: ExactStep, device: EmulatedDevice | None, inputs: Any) -> None:
    """Notes when the replica has its batch, if the replica is emulated."""
    if device is None:
        return
    flat = tf.nest.flatten(inputs, expand_composites=True)
    with tf.control_dependencies([item for item in flat if tf.is_tensor(item)]):
        step.start_time = tf.timestamp()
    step.emulated_device = device


def wait_with_gradients(step: ExactStep, gradients: list[Any]) -> list[Any]:
    """Returns the gradients when the emulated device would have computed them."""
    return wait_until_computed(step, gradients)


def wait_until_computed(step: ExactStep, values: Sequence[Any]) -> list[Any]:
    """Delays tensors until the emulated device's compute time since `start_clock` has passed.

    Args:
        step: the running step; nothing happens if its device is not emulated.
        values: tensors or `tf.IndexedSlices` that the collective waits for.
    """
    if step.start_time is None:
        return list(values)
    model = step.emulated_device.time_model
    flat = tf.nest.flatten(list(values), expand_composites=True)
    with tf.control_dependencies(flat):
        waited = tf.numpy_function(
            _sleep_until,
            [step.start_time, step.samples, model.fixed_seconds, model.seconds_per_sample],
            tf.float64,
        )
    with tf.control_dependencies([waited]):
        delayed = [tf.identity(item) for item in flat]
    return list(tf.nest.pack_sequence_as(list(values), delayed, expand_composites=True))


def _sleep_until(
    start: np.ndarray, samples: np.ndarray, fixed_seconds: float, seconds_per_sample: float
) -> np.float64:
    """Sleeps until the emulated compute time is over; a share of zero takes no time."""
    if samples == 0:
        return np.float64(0.0)
    end = float(start) + float(fixed_seconds) + float(samples) * float(seconds_per_sample)
    remaining = end - time.time()
    if remaining > 0:
        time.sleep(remaining)
    return np.float64(max(remaining, 0.0))
