"""The devices that tests train on: parts of the CPU, or of a GPU where the environment says so.

`KERAS_HET_TEST_DEVICES=GPU` runs the tests of training on parts of the first GPU (`make test-gpu`).
`KERAS_HET_TEST_XLA=1` lets XLA compile what it can, on one device too (`make test-xla`).
"""

from __future__ import annotations

import functools
import os

TYPE = os.environ.get("KERAS_HET_TEST_DEVICES", "CPU")
MAX_DEVICES = 4
XLA = os.environ.get("KERAS_HET_TEST_XLA") == "1"
DEVICES = tuple(f"{TYPE}:{index}" for index in range(MAX_DEVICES))
# Of each part of a GPU. Several test processes share it, and take what they need of this.
GPU_MEGABYTES = 2048
if TYPE == "GPU":
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"


@functools.cache
def create_logical_devices(number: int = MAX_DEVICES) -> tuple[str, ...]:
    """Split the CPU, and a GPU that tests train on; must run before the first TensorFlow operation.

    Return the names of the parts that tests train on.
    """
    import keras
    import tensorflow as tf

    if not tf.config.list_physical_devices(TYPE):
        raise RuntimeError(f"TensorFlow sees no {TYPE}. Received: KERAS_HET_TEST_DEVICES={TYPE}.")
    # XLA draws other random numbers.
    keras.Model._resolve_auto_jit_compile = _supports_jit if XLA else lambda model: False
    parts = [tf.config.LogicalDeviceConfiguration()] * number
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    if TYPE == "GPU":
        parts = [tf.config.LogicalDeviceConfiguration(memory_limit=GPU_MEGABYTES)] * number
        gpu = tf.config.list_physical_devices("GPU")[0]
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.set_logical_device_configuration(gpu, parts)
        # TensorFloat-32 drops bits, and whether it is used depends on the size of a batch.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    return tuple(device.name for device in tf.config.list_logical_devices(TYPE))


def _supports_jit(model) -> bool:
    return all(layer.supports_jit for layer in model._flatten_layers())
