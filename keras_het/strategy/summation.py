"""Alias of `keras_het.summation`."""

from keras_het.summation import *  # noqa: F403
from keras_het.summation import __all__ as __all__

if __name__ == "__main__":
    from keras_het.summation.machine import main

    main()
