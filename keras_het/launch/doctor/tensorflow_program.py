"""The program that imports TensorFlow for `ask_tensorflow`."""

from __future__ import annotations

import contextlib
from typing import Any

from keras_het.launch.doctor.tensorflow_facts import say


def main() -> None:
    """Import TensorFlow and Keras, and print what they are built for and what they see."""
    import keras
    import tensorflow as tf

    build = dict(tf.sysconfig.get_build_info())
    listed = tf.config.list_physical_devices("GPU")
    say(
        {
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "cuda": str(build.get("cuda_version", "")) if build.get("is_cuda_build") else "",
            "cudnn": str(build.get("cudnn_version", "")),
            "kernels": list(build.get("cuda_compute_capabilities", [])),
            "gpus": [_product(tf, device) for device in listed],
            "replicas": _used(tf) if listed else 0,
        }
    )


def _product(tf: Any, device: Any) -> str:
    with contextlib.suppress(Exception):  # a name is not worth an end
        return str(tf.config.experimental.get_device_details(device).get("device_name", ""))
    return ""


def _used(tf: Any) -> int:
    """Number of GPUs of which TensorFlow makes devices; it says in its log why not of others."""
    with contextlib.suppress(RuntimeError, tf.errors.OpError):
        return len(tf.config.list_logical_devices("GPU"))
    return 0


if __name__ == "__main__":
    main()
