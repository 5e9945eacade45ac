"""Program: worker 1 leaves with `sys.exit` while worker 0 waits for it in a barrier."""

from __future__ import annotations

import sys

import keras_het
from keras_het.strategy.cluster import departure

departure._LONGEST_WAIT_SECONDS = 1.0
strategy = keras_het.HeterogeneousStrategy()
if strategy.worker_index == 1:
    sys.exit("no data")
print("waiting", flush=True)
strategy.barrier()
print("went on", flush=True)
