"""Emulated devices: with `keras-het run --emulate-speeds` steps last as long as on theirs.

The replica waits without burning CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.planning.time_model import LinearTimeModel, MicroBatchTimeModel
from keras_het.value_types import Leaf

_logger = logging.getLogger(__name__)

KERAS_HET_EMULATED_DEVICES = "KERAS_HET_EMULATED_DEVICES"

# About as many steps as the thousand kernels that CUDA queues.
_QUEUE_DEPTH = 8
_slowdowns: dict[int, float] = {}
_EXAMPLE = '[{"speed": 4.0, "fixed_seconds": 0.0, "seconds_per_sample": 0.001}]'


# An asynchronous one works ahead of its host, as a GPU does: the host waits for it where it reads a
# result, and in collectives.
@dataclass(frozen=True)
class EmulatedDevice:
    """A device that takes at least the time its time model says for each step."""

    speed: float
    time_model: LinearTimeModel
    asynchronous: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise ValueError(
                "An emulated device needs a positive finite speed. Received: "
                f"speed={self.speed!r}. Give relative speeds such as 4, 2 and 1."
            )

    def in_parts(self, micro_batch_size: int) -> EmulatedDevice:
        """Return the same device as it computes shares in parts: each has the fixed costs."""
        fixed, slope = self.time_model.fixed_seconds, self.time_model.seconds_per_sample
        model = MicroBatchTimeModel(fixed, slope, fixed, micro_batch_size)
        return dataclasses.replace(self, time_model=model)

    def describe(self) -> str:
        """Return one line for logs and plots that labels the device as EMULATED."""
        model, kind = self.time_model, "asynchronous device" if self.asynchronous else "device"
        fixed = f"{1000 * model.fixed_seconds:g} ms + " if model.fixed_seconds else ""
        return (
            f"EMULATED {kind} of speed {self.speed:g}: a step takes at least "
            f"{fixed}{1000 * model.seconds_per_sample:g} ms per sample"
        )


def works_ahead(device: str, emulated: EmulatedDevice | None) -> bool:
    """Whether a device computes while its host continues, so that reading a result stops it."""
    return "CPU" not in device or (emulated is not None and emulated.asynchronous)


def read_emulated_devices(
    environ: Mapping[str, str] | None = None,
) -> tuple[EmulatedDevice, ...] | None:
    text = (os.environ if environ is None else environ).get(KERAS_HET_EMULATED_DEVICES, "")
    if not text.strip():
        return None
    try:
        return tuple(_device(**each) for each in json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The environment variable {KERAS_HET_EMULATED_DEVICES} must be a JSON list with an "
            f"object for each local replica: {error}. Received: {text!r}; expected for example "
            f"{_EXAMPLE}. Unset it to use the devices as they are, or let `keras-het run "
            "--emulate-speeds` set it."
        ) from error


def _device(
    speed: float, fixed_seconds: float, seconds_per_sample: float, asynchronous: bool = False
) -> EmulatedDevice:
    return EmulatedDevice(speed, LinearTimeModel(fixed_seconds, seconds_per_sample), asynchronous)


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
        "A custom function in strategy.run does not wait for emulated devices "
        "(KERAS_HET_EMULATED_DEVICES, `keras-het run --emulate-speeds`): only Keras's own steps, "
        "such as in fit, do. Its times say nothing about devices of different speed."
    )


def slow_down(replica: int, factor: float) -> None:
    """Slow down an emulated device of this process from its next step on."""
    if not factor > 0:
        raise ValueError(f"factor must be positive; 1 is the usual speed. Received: {factor}.")
    _slowdowns[replica] = float(factor)


# A launch returns at once unless the queue is full; a copy to the host waits for all before it.
class DeviceQueue:
    """What an asynchronous device has yet to compute: the times at which its steps end."""

    def __init__(self, depth: int = _QUEUE_DEPTH) -> None:
        self._ends: deque[float] = deque([0.0], maxlen=depth)
        self._lock = threading.Lock()

    @property
    def busy_until(self) -> float:
        """When the latest step ends, in seconds since the epoch."""
        return self._ends[-1]

    def launch(self, seconds: float, begun: float) -> None:
        """Queue a step, whose first kernels the host has queued at a time."""
        if len(self._ends) == self._ends.maxlen:
            _sleep_until(self._ends[0])
        with self._lock:
            self._ends.append(max(max(self.busy_until, begun) + seconds, time.time()))

    def wait(self) -> None:
        """Wait until all is computed."""
        _sleep_until(self.busy_until)

    def meet(self, busy_until: float) -> None:
        """Wait for other devices in a collective, and let the host wait, too."""
        # NCCL's operations are queued, but TensorFlow starts what depends on them only when they
        # have ended.
        with self._lock:
            self._ends[-1] = max(self.busy_until, busy_until)
        self.wait()


_queues: dict[int, DeviceQueue] = {}


def queue_of(replica: int) -> DeviceQueue:
    """Return the queue of an asynchronous device of this process."""
    return _queues.setdefault(replica, DeviceQueue())


def until_computed() -> Callable[[], None]:
    """Return a function that waits for what asynchronous devices have queued so far."""
    end = max((queue.busy_until for queue in _queues.values()), default=0.0)
    return functools.partial(_sleep_until, end)


def held(
    device: EmulatedDevice,
    replica_id: int,
    samples: tf.Tensor,
    start_time: tf.Tensor,
    values: Sequence[Leaf],
) -> tuple[list[Leaf], tf.Tensor]:
    """Return values when the host may continue, and how long that was to wait; in the graph."""
    # when the device would have computed them, or when an asynchronous one has queued them

    def wait(start: np.ndarray, samples: np.ndarray) -> np.float64:
        seconds = device.time_model.seconds(int(samples)) if samples else 0.0
        seconds *= _slowdowns.get(replica_id, 1.0)
        before = time.time()
        if device.asynchronous:
            queue_of(replica_id).launch(seconds, float(start))
        elif seconds:
            _sleep_until(float(start) + seconds)
        return np.float64(time.time() - before)

    flat = tf.nest.flatten(list(values), expand_composites=True)
    with tf.control_dependencies(flat):
        waited = _on_host(wait, start_time, samples)
    with tf.control_dependencies([waited]):
        later = [tf.identity(item) for item in flat]
    return list(tf.nest.pack_sequence_as(list(values), later, expand_composites=True)), waited


def copied_to_host(replica: int, values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Wait in the graph for an asynchronous device that computes values, as a copy of them does."""

    def wait() -> np.float64:
        queue_of(replica).wait()
        return np.float64(0.0)

    with tf.control_dependencies(list(values)):
        return _on_host(wait)


def busy_until(replica: int, queued: tf.Tensor) -> tf.Tensor:
    """Return when an asynchronous device ends the step that it has queued; in the graph."""
    with tf.control_dependencies([queued]):
        return _on_host(lambda: np.float64(queue_of(replica).busy_until))


def meet(replica: int, time: tf.Tensor) -> None:
    """Let an asynchronous device, and its host, wait for others in a collective; in the graph."""

    def wait(time: np.ndarray) -> np.float64:
        queue_of(replica).meet(float(time))
        return np.float64(0.0)

    _on_host(wait, time)


def _on_host(function: Callable[..., np.float64], *inputs: tf.Tensor) -> tf.Tensor:
    """Call a function of NumPy values in the graph, and return its float64 result."""
    with tf.device("CPU:0"):
        # Independently: one after the other, devices of a process would not be slow together.
        result = private_api.run_independently(tf.numpy_function(function, inputs, tf.float64))
        result.set_shape([])
        return result


def _sleep_until(end: float) -> None:
    if (remaining := end - time.time()) > 0:
        time.sleep(remaining)
