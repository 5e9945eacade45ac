"""The CPU of a worker as several devices."""

from __future__ import annotations

import json
import os

import tensorflow as tf


def split_devices(numbers: str) -> tuple[list[int], int]:
    """Split the CPU; return the workers' numbers of devices, given with commas, and one's own."""
    devices = [int(number) for number in numbers.split(",")]
    own = devices[json.loads(os.environ["TF_CONFIG"])["task"]["index"]]
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * own
    tf.config.set_logical_device_configuration(cpu, logical)
    return devices, own
