"""Passes of emulated devices, which last as long as those devices would take."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.planning.bounded_shares import FloatArray
from keras_het.planning.pipeline.plan import Stage
from keras_het.strategy.measure.emulated_device import EmulatedDevice


class Emulation:
    """How long the emulated devices of this process take for each pass.

    The time that a device takes for a sample, forward and backward through the whole model, is
    divided over the layer calls in proportion to measured times.
    """

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
    ) -> EmulatedPass:
        """Begin a pass when what it takes is there; in the graph."""
        forward, backward = self.seconds_per_sample(device)
        own = slice(stage.first, stage.end)
        seconds = forward[own].sum() if kind == "forward" else backward[own].sum()
        if kind == "backward":
            seconds += forward[list(stage.recomputed)].sum()
        return EmulatedPass(inputs, tf.cast(rows, tf.float64) * seconds, after)


class EmulatedPass:
    """One pass on an emulated device; it ends when the time of that device is over."""

    def __init__(
        self, inputs: Sequence[tf.Tensor], seconds: tf.Tensor, after: Sequence[tf.Operation]
    ) -> None:
        self._seconds = seconds
        with tf.control_dependencies([*inputs, *after]), tf.device("CPU:0"):
            self._start = private_api.run_independently(tf.timestamp())

    def end(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the values, later."""
        with tf.control_dependencies(list(values)), tf.device("CPU:0"):
            times = [self._start, self._seconds]
            waited = private_api.run_independently(tf.numpy_function(_wait, times, tf.float64))
        with tf.control_dependencies([waited]):
            return [tf.identity(value) for value in values]


def _wait(start: np.ndarray, seconds: np.ndarray) -> np.float64:
    left = float(start) + float(seconds) - time.time()
    if left > 0:
        time.sleep(left)
    return np.float64(max(left, 0.0))
