"""Program: runs checks on one worker, or on one device, and writes what they give.

Arguments: folder of the results; module of the checks; number of devices of each worker, separated
by commas, or 0 for one device without a strategy; settings of the summation as JSON, null for
none; names of the checks. A task of the job "summation" is a machine that sums.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from recording import CHECKS, Recording, run_each

import keras_het
from keras_het.summation import Summation, machine


def create_strategy(num_devices: int, summation: dict[str, Any] | None) -> Any:
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * num_devices
    tf.config.set_logical_device_configuration(cpu, logical)
    return keras_het.HeterogeneousStrategy(
        devices=[f"CPU:{index}" for index in range(num_devices)],
        gradient_reduction="all_reduce" if summation is None else Summation(**summation),
    )


def results_of(check: str, strategy: Any) -> dict[str, np.ndarray]:
    recording = Recording(strategy)
    CHECKS[check](recording)
    return recording.results


def main() -> None:
    folder, module, devices, summation, *names = sys.argv[1:]
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    if config and config["task"]["type"] == "summation":
        machine.serve_until_stopped()
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
    run_each(names, lambda check: results_of(check, strategy), Path(folder), name)
    if strategy is not None and strategy.extended.summation is not None:
        print("partitions", json.dumps(strategy.extended.summation.num_partitions), flush=True)


main()
