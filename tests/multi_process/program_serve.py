"""Program: the command `keras-het parameter-server`, which ends after one training."""

import sys

from keras_het.launch.command_line import main

sys.exit(main(["parameter-server", *sys.argv[1:]]))
