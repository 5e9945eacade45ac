"""Program: workers that believe that they have GPUs, and ask for NCCL; CPUs ignore the wish.

Argument: what happens: "answers", "hangs" on worker 1, or "one GPU" that both have.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from typing import Any

import tensorflow as tf
from recorded import arrays
from recording import small_model

import keras_het
from keras_het.strategy.cluster import nccl

KIND = sys.argv[1]
OWN = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
original = nccl.check_answers


def check_answers(first_sum: Any, end: Any) -> None:
    if KIND == "hangs" and OWN == 1:
        threading.Event().wait(60.0)  # until the other one has ended
    original(first_sum, end, seconds=3.0 if KIND == "hangs" else 60.0)


nccl.is_wanted = lambda *_: True
nccl.identities = lambda devices: ["GPU-0" if KIND == "one GPU" else f"GPU-{OWN}"]
nccl.check_answers = check_answers


def hints_of(graph: tf.Graph) -> set[str]:
    """How collectives of a graph are carried out."""
    return {
        operation.get_attr("communication_hint").decode()
        for operation in graph.get_operations()
        if operation.type == "CollectiveReduceV2" and operation.get_attr("T") == tf.float32
    }


def main() -> None:
    strategy = keras_het.HeterogeneousStrategy()

    @tf.function
    def total() -> Any:
        return strategy.run(lambda: strategy.extended.sum_over_workers(tf.ones([2])))

    hints = hints_of(total.get_concrete_function().graph)
    with strategy.scope():
        model = small_model("sgd")
    x, y = arrays(8)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    for graph in gc.get_objects():  # of the steps, too
        if isinstance(graph, tf.Graph):
            hints |= hints_of(graph)
    print("HINTS", *sorted(hints), flush=True)


main()
