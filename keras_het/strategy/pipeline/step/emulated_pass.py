"""Passes of emulated devices, which last as long as those devices would take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.planning.pipeline.plan import Stage
from keras_het.planning.shares import FloatArray
from keras_het.strategy.measure.emulated_device import EmulatedDevice


# A device's time for a sample is divided over the layer calls in proportion to measured times.
class Emulation:
    """How long the emulated devices of this process take for each pass."""

    def __init__(
        self,
        devices: dict[str, EmulatedDevice],
        forward_seconds: FloatArray,
        backward_seconds: FloatArray,
    ) -> None:
        self._devices = devices
        total = float(np.sum(forward_seconds) + np.sum(backward_seconds))
        self._forward, self._backward = forward_seconds / total, backward_seconds / total

    def seconds_per_sample(self, device: str) -> tuple[FloatArray, FloatArray]:
        """Return the times of each layer call for a sample, forward and backward, float64 [L]."""
        each = self._devices[device].time_model.seconds_per_sample
        return self._forward * each, self._backward * each

    def begin(
        self,
        device: str,
        stage: Stage,
        kind: str,
        rows: tf.Tensor,
        inputs: Sequence[tf.Tensor],
        after: Sequence[tf.Operation],
    ) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
        """Begin a pass, and return the function that gives its results back when it may end."""
        forward, backward = self.seconds_per_sample(device)
        own = slice(stage.first, stage.end)
        seconds = forward[own].sum() if kind == "forward" else backward[own].sum()
        if kind == "backward":
            seconds += forward[list(stage.recomputed)].sum()
        wanted = tf.cast(rows, tf.float64) * seconds
        with tf.control_dependencies([*inputs, *after]), tf.device("CPU:0"):
            start = private_api.run_independently(tf.timestamp())

        def end(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            with tf.control_dependencies(list(values)), tf.device("CPU:0"):
                wait = tf.numpy_function(_wait, [start, wanted], tf.float64)
                waited = private_api.run_independently(wait)
            with tf.control_dependencies([waited]):
                return [tf.identity(value) for value in values]

        return end


def _wait(start: np.ndarray, seconds: np.ndarray) -> np.float64:
    left = float(start) + float(seconds) - time.time()
    if left > 0:
        time.sleep(left)
    return np.float64(max(left, 0.0))
