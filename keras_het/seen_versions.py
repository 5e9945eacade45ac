"""The versions of Keras and TensorFlow that the tests cover."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

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
            f"{name} relies on what another version has moved; other parts of keras_het may work. "
            f"Received: Keras {keras.__version__}, TensorFlow {tf.__version__}: {error}. Install "
            "versions that were seen, with pip install --upgrade . in the checkout of keras_het."
        ) from error
