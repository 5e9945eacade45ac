"""Parts of a batch go to their replicas' devices before the step that computes on them.

A step that copies its batch begins with that copy. Made while the device computes the step before,
the copy costs no time, as with `prefetch_to_device`, but with shares that may change.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from keras_het.loader.order.rows import count_bytes
from keras_het.strategy.measure.memory_use import USABLE, memory_of
from keras_het.value_types import Nest, Rows

SWITCH = "KERAS_HET_PREFETCH"


def is_worthwhile(devices: Sequence[str]) -> bool:
    """Whether batches have to be copied to these devices, and are to be copied ahead."""
    setting = os.environ.get(SWITCH)
    return setting == "1" or (setting != "0" and any("CPU" not in device for device in devices))


class Placement:
    """Copies each local replica's part of a batch to its device."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices

    def __call__(self, parts: list[Nest]) -> list[Nest]:
        """Return the parts, dense tensors of which lie on the devices."""
        return [
            tf.nest.map_structure(lambda leaf, device=device: _dense_on(leaf, device), part)
            for part, device in zip(parts, self._devices, strict=True)
        ]

    def ahead(self, parts: list[Nest]) -> list[Nest]:
        """Return the same while a step computes; parts stay on the host where memory is short."""
        for part, device in zip(parts, self._devices, strict=True):
            memory = memory_of(device)
            room = None if memory is None else USABLE * memory.limit - memory.peak
            if room is not None and count_bytes(part) > room:
                return parts
        try:
            return self(parts)
        except tf.errors.ResourceExhaustedError:
            return parts


def on_device(value: Rows, device: str) -> Rows:
    """Return a tensor, ragged or sparse ones included, on a device."""
    if getattr(value, "backing_device", "").endswith(device):  # which may name no job and task
        return value
    with tf.device(device):
        return tf.nest.map_structure(tf.identity, value, expand_composites=True)


def _dense_on(leaf: Nest, device: str) -> Nest:
    is_numbers = tf.is_tensor(leaf) and not isinstance(leaf, tf.__internal__.CompositeTensor)
    # strings lie on the host, and so do integers of 32 bits of a GPU
    if not is_numbers or leaf.dtype in (tf.string, tf.int32, tf.variant):
        return leaf
    return on_device(leaf, device)
