"""The backend and the versions of Keras and TensorFlow with which this package works."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from typing import Any

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


FIRST_UNSEEN = {"Keras": (3, 16), "TensorFlow": (2, 22)}
"""The upper bounds of pyproject.toml, which an environment may override."""

_logger = logging.getLogger(__name__)


@functools.cache
def warn_of_unseen_versions() -> None:
    """Warn once that a version is newer than the tests cover, before an import fails on it."""
    import keras
    import tensorflow as tf

    installed = {"Keras": keras.__version__, "TensorFlow": tf.__version__}
    unseen = [
        f"{name} {version} (seen: below {'.'.join(map(str, FIRST_UNSEEN[name]))})"
        for name, version in installed.items()
        if tuple(map(int, version.split(".")[:2])) >= FIRST_UNSEEN[name]
    ]
    if unseen:
        _logger.warning(
            "keras_het has not been tested with %s. If it fails, or numbers differ from one "
            "device, install tested versions: pip install 'keras<%s' 'tensorflow<%s'.",
            " and ".join(unseen),
            *(".".join(map(str, FIRST_UNSEEN[name])) for name in ("Keras", "TensorFlow")),
        )


def import_part(module: str, name: str) -> Any:
    """Return what a module of the package has under a name."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("keras", "tensorflow"):
            raise
        import keras
        import tensorflow as tf

        raise ImportError(
            f"{name} uses a private symbol that this version of Keras or TensorFlow has moved; "
            "other parts of keras_het may still work. "
            f"Received: Keras {keras.__version__}, TensorFlow {tf.__version__}: {error}. Install "
            "tested versions: pip install --upgrade . in the checkout of keras_het."
        ) from error
