"""Alias of `keras_het.asynchronous.rules`."""

from keras_het.asynchronous.rules import *  # noqa: F403
from keras_het.asynchronous.rules import __all__ as __all__
