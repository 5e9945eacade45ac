"""Program: the command `keras-het serve`, which ends after one training."""

import sys

from keras_het.launch.command_line import main

sys.exit(main(["serve", *sys.argv[1:]]))
