"""Program: runs checks on one worker, or on one device, and writes what they give.

Arguments: folder of the results; module of the checks; number of devices of each worker, separated
by commas, or 0 for one device without a strategy; names of the checks.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from recording import CHECKS, Recording

import keras_het

LONGEST_CHECK_SECONDS = 100


def create_strategy(num_devices: int) -> Any:
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * num_devices
    tf.config.set_logical_device_configuration(cpu, logical)
    devices = [f"CPU:{index}" for index in range(num_devices)]
    return keras_het.HeterogeneousStrategy(devices=devices)


def task_position() -> int:
    """This process's place among all tasks, the chief first."""
    config = json.loads(os.environ["TF_CONFIG"])
    index: int = config["task"]["index"]
    before = len(config["cluster"].get("chief", []))
    return index + before if config["task"]["type"] == "worker" else 0


def main() -> None:
    folder, module, devices, *names = sys.argv[1:]
    importlib.import_module(module)
    name, strategy = "single", None
    if devices != "0":
        strategy = create_strategy(int(devices.split(",")[task_position()]))
        name = f"worker_{strategy.worker_index}"
    for check in names:
        # A worker that waits for ever is ended, with a stack trace in its output.
        faulthandler.dump_traceback_later(LONGEST_CHECK_SECONDS, exit=True)
        keras.backend.clear_session()
        started = time.monotonic()
        recording = Recording(strategy)
        try:
            CHECKS[check](recording)
        except Exception:
            traceback.print_exc()
            recording.results = {"failed": np.array(traceback.format_exc())}
        np.savez(Path(folder) / f"{check}-{name}.npz", **recording.results)
        print(f"{check}: {time.monotonic() - started:.1f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()


main()
