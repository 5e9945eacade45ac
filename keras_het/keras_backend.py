"""The one backend of Keras that this package trains with."""

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
