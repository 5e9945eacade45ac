"""Step time with the Telemetry callback against without it, in one process with two devices.

    python benchmarks/telemetry.py [--json FILE] [--quick]

A step's length is set by a device that waits without using the CPU, so that the machine's other
work does not hide what telemetry costs. Both trainings are alive for the whole run and take turns
in short blocks; a row is the median of the ratios of neighbouring blocks. A third one takes turns
with them: without telemetry too, it shows what the method itself adds or hides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

import keras
import numpy as np
import tensorflow as tf
from _report import environment, print_table, write_report

STEP_MILLISECONDS = (1.0, 5.0, 20.0)
REPLICAS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="few short blocks: form, not numbers")
    arguments = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    )
    blocks, seconds = (2, 0.1) if arguments.quick else (11, 1.0)
    rows = [measure(each, blocks, seconds) for each in STEP_MILLISECONDS]
    columns = ["case", "step_time_ratio", "lowest_ratio", "highest_ratio", "control_ratio"]
    print_table(rows, [*columns, "step_milliseconds", "bytes_per_replica_and_step"])
    write_report("telemetry", rows, arguments.json, environment())


def measure(milliseconds: float, blocks: int, seconds: float) -> dict[str, Any]:
    """Return one row."""
    steps = max(10, int(1e3 * seconds / milliseconds))
    with tempfile.TemporaryDirectory() as folder:
        plain = Training(milliseconds, steps, None)
        control = Training(milliseconds, steps, None)
        watched = Training(milliseconds, steps, folder)
        trainings = (plain, watched, control)
        for each in trainings:
            each.block()  # traces the step and warms up
        times = [[each.block() for each in trainings] for _ in range(blocks)]
        written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    ratios = sorted(row[1] / row[0] for row in times)
    return {
        "case": f"{milliseconds:g} ms",
        "step_time_ratio": round(statistics.median(ratios), 4),
        "lowest_ratio": round(ratios[0], 4),
        "highest_ratio": round(ratios[-1], 4),
        "control_ratio": round(statistics.median(row[2] / row[0] for row in times), 4),
        "step_milliseconds": round(1e3 * statistics.median(row[0] for row in times), 3),
        "bytes_per_replica_and_step": round(written / REPLICAS / steps / (blocks + 1), 1),
        "num_blocks": blocks,
        "steps_per_block": steps,
    }


class Training:
    """A model that trains in blocks.

    Args:
        milliseconds: length of a step.
        steps: steps of a block.
        log_dir: directory of its telemetry, None for none.
    """

    def __init__(self, milliseconds: float, steps: int, log_dir: str | None) -> None:
        import keras_het

        self._callbacks = [keras_het.callbacks.Telemetry(log_dir)] if log_dir else []
        strategy = keras_het.HeterogeneousStrategy(devices=[f"CPU:{i}" for i in range(REPLICAS)])
        with strategy.scope():
            inputs = keras.Input((4,))
            slept = Sleep(milliseconds / 1e3)(inputs)
            self._model = keras.Model(inputs, keras.layers.Dense(1)(slept))
            self._model.compile("sgd", "mse")
        rows = np.ones((8 * steps, 4), np.float32)
        self._data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(8)

    def block(self) -> float:
        """Train for a block, and return the time of a step in seconds, without the first steps."""
        watch = Watch()
        self._model.fit(self._data, verbose=0, callbacks=[*self._callbacks, watch])
        return watch.seconds


class Sleep(keras.layers.Layer):
    """Waits in the forward pass, without using the CPU; the wait is the first replica's.

    Args:
        seconds: how long.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def call(self, inputs: Any) -> Any:
        """Return the inputs, later."""

        def wait(values: Any) -> Any:
            time.sleep(self._seconds)
            return values

        # not stateful: TensorFlow would let one replica wait after the other
        waited = tf.numpy_function(wait, [inputs], tf.float32, stateful=False)
        waited.set_shape(inputs.shape)
        return tf.stop_gradient(waited)


class Watch(keras.callbacks.Callback):
    """The time of a step; of the same kind for all trainings.

    Attributes:
        seconds: mean over the epoch, without its first steps.
    """

    _SKIPPED = 5

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self._SKIPPED:
            self._start = time.perf_counter()
        self._last, self._now = batch, time.perf_counter()

    def on_train_end(self, logs: Any = None) -> None:
        self.seconds = (self._now - self._start) / (self._last - self._SKIPPED)


if __name__ == "__main__":
    main()
