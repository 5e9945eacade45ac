"""Program: trains with a BatchBalancer; one replica's memory holds only a small share.

Arguments: folder that remembers; replica; most samples that it holds; file for the shares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
from recorded import arrays
from small_memory import Memory

import keras_het

FOLDER, REPLICA, MOST, RESULT = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def holds(replica: int, samples: int) -> bool:
    return replica != REPLICA or samples <= MOST


def main() -> None:
    strategy = keras_het.HeterogeneousStrategy()
    Memory.holds = staticmethod(holds)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), Memory(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    balancer = keras_het.callbacks.BatchBalancer(memory_dir=FOLDER)
    x, y = arrays(200)
    model.fit(x, y, batch_size=20, epochs=1, shuffle=False, verbose=0, callbacks=[balancer])
    Path(RESULT).write_text(json.dumps([row["shares"] for row in balancer.measurements]))


main()
