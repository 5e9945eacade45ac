"""Alias of `keras_het.local_training`."""

from keras_het.local_training import *  # noqa: F403
from keras_het.local_training import __all__ as __all__
