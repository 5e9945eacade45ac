"""`python -m keras_het.strategy.summation` on a spare machine."""

from keras_het.strategy.summation.machine import main

if __name__ == "__main__":
    main()
