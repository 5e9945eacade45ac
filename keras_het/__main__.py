"""`python -m keras_het`, the same as the command `keras-het`."""

import sys

from keras_het.launch.command_line import main

if __name__ == "__main__":
    sys.exit(main())
