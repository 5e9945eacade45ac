"""The one Keras backend that this package trains with."""

import os
import sys

KERAS_BACKEND = "KERAS_BACKEND"
NEEDED_BACKEND = "tensorflow"


def check_keras_backend(backend: str) -> None:
    """Refuse other backends: their trainers see no strategy, and each worker would train alone."""
    if backend != NEEDED_BACKEND:
        raise ValueError(
            "keras_het needs the TensorFlow backend of Keras. Received: the backend "
            f"{backend!r}; expected: {NEEDED_BACKEND!r}. Set {KERAS_BACKEND}={NEEDED_BACKEND} in "
            'the environment before keras is imported; it wins over "backend" in '
            "~/.keras/keras.json."
        )


def check_keras_backend_before_import() -> None:
    """Refuse other backends before Keras is imported, which could otherwise fail on them first."""
    if "keras" not in sys.modules:
        check_keras_backend(os.environ.get(KERAS_BACKEND) or NEEDED_BACKEND)
