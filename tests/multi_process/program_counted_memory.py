"""Program: trains with a BatchBalancer; worker 1 is fast, has little memory and counts its bytes.

Arguments: micro_batch_size ("auto" or "None"); folder for the shares and for the largest part.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
from recorded import arrays
from small_memory import Memory

import keras_het
from keras_het.strategy.measure import memory_use

SIZE, FOLDER = None if sys.argv[1] == "None" else sys.argv[1], Path(sys.argv[2])
RESIDENT, EACH, LIMIT = 1000, 100, 4000  # 26 samples fit into nine tenths, 30 into all
largest = 0


def holds(replica: int, samples: int) -> bool:
    global largest
    if replica != 1:
        return True
    largest = max(largest, samples)
    return RESIDENT + EACH * largest <= LIMIT


def main() -> None:
    strategy = keras_het.HeterogeneousStrategy(micro_batch_size=SIZE)
    worker = strategy.layout.local_replicas.start

    def memory_of(device: str) -> memory_use.Memory | None:
        peak = RESIDENT + EACH * largest
        return memory_use.Memory(RESIDENT, peak, LIMIT) if worker == 1 else None

    memory_use.memory_of = memory_of
    Memory.holds = staticmethod(holds)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), Memory(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    balancer = keras_het.callbacks.BatchBalancer()
    x, y = arrays(1600)
    model.fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0, callbacks=[balancer])
    shares = [row["shares"][1] for row in balancer.measurements]
    result = {"shares": shares, "largest": largest, "summary": balancer.summary()}
    (FOLDER / f"worker_{worker}.json").write_text(json.dumps(result))


main()
