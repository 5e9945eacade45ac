"""Alias of `keras_het.asynchronous.parameter_service`."""

from keras_het.asynchronous.parameter_service import *  # noqa: F403
from keras_het.asynchronous.parameter_service import __all__ as __all__
