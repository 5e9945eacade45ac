"""Program: runs checks on one worker, or on one device, and writes what they give.

Arguments: folder of the results; module of the checks; number of devices of each worker, separated
by commas, or 0 for one device without a strategy; settings of the summation as JSON, null for
none; names of the checks. A task of the job "summation" is a machine that sums.
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
from keras_het.summation import Summation, machine

LONGEST_CHECK_SECONDS = 100


def create_strategy(num_devices: int, summation: dict[str, Any] | None) -> Any:
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * num_devices
    tf.config.set_logical_device_configuration(cpu, logical)
    return keras_het.HeterogeneousStrategy(
        devices=[f"CPU:{index}" for index in range(num_devices)],
        aggregation="all_reduce" if summation is None else Summation(**summation),
    )


def main() -> None:
    folder, module, devices, summation, *names = sys.argv[1:]
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    if config and config["task"]["type"] == "summation":
        machine.main()
        return
    importlib.import_module(module)
    name, strategy = "single", None
    if devices != "0":
        # this process's place among all workers, the chief first
        place = config["task"]["index"]
        if config["task"]["type"] == "worker":
            place += len(config["cluster"].get("chief", []))
        strategy = create_strategy(int(devices.split(",")[place]), json.loads(summation))
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
    if strategy is not None and strategy.extended.summation is not None:
        print("partitions", json.dumps(strategy.extended.summation.num_partitions), flush=True)


main()
