"""Program: creates a strategy and ends."""

import keras_het

keras_het.HeterogeneousStrategy()
