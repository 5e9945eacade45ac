"""Entry point of `python -m keras_het.summation` on a spare machine."""

from keras_het.summation.machine import main

if __name__ == "__main__":
    main()
