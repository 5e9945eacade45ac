"""The one backend of Keras that this package trains with."""

import os
import sys

KERAS_BACKEND = "KERAS_BACKEND"
NEEDED_BACKEND = "tensorflow"


def check_keras_backend(backend: str) -> None:
    """Refuses another backend: its trainers see no strategy, and each worker would train alone.

    Args:
        backend: what `keras.backend.backend()` returns, or the environment asks for.

    Raises:
        ValueError: if it is not TensorFlow.
    """
    if backend != NEEDED_BACKEND:
        raise ValueError(
            "keras_het needs the TensorFlow backend of Keras. Received: the backend "
            f"{backend!r}; expected: {NEEDED_BACKEND!r}. Set {KERAS_BACKEND}={NEEDED_BACKEND} in "
            'the environment before keras is imported; it wins over "backend" in '
            "~/.keras/keras.json."
        )


def check_keras_backend_before_import() -> None:
    """Refuses another backend while Keras is not imported yet, which could fail on it first.

    Raises:
        ValueError: if the environment asks for another one than TensorFlow.
    """
    if "keras" not in sys.modules:
        check_keras_backend(os.environ.get(KERAS_BACKEND) or NEEDED_BACKEND)
