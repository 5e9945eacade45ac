"""Program: runs checks on workers whose gradients are summed by machines, or is such a machine.

Arguments: folder of the results; module of the checks; number of devices of each worker, separated
by commas; settings of the summation as JSON; names of the checks.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
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


def create_strategy(num_devices: int, settings: dict[str, Any]) -> Any:
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * num_devices
    tf.config.set_logical_device_configuration(cpu, logical)
    devices = [f"CPU:{index}" for index in range(num_devices)]
    return keras_het.HeterogeneousStrategy(devices=devices, aggregation=Summation(**settings))


def main() -> None:
    faulthandler.enable()
    folder, module, devices, settings, *names = sys.argv[1:]
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    if task["type"] == "summation":
        machine.main()
        return
    importlib.import_module(module)
    num_devices = int(devices.split(",")[task["index"]])
    strategy = create_strategy(num_devices, json.loads(settings))
    for check in names:
        faulthandler.dump_traceback_later(LONGEST_CHECK_SECONDS, exit=True)
        keras.backend.clear_session()
        recording = Recording(strategy)
        try:
            CHECKS[check](recording)
        except Exception:
            traceback.print_exc()
            recording.results = {"failed": np.array(traceback.format_exc())}
        np.savez(Path(folder) / f"{check}-worker_{strategy.worker_index}.npz", **recording.results)
    faulthandler.cancel_dump_traceback_later()
    group = strategy.extended.summation
    print("partitions", json.dumps(group.num_partitions), flush=True)


main()
