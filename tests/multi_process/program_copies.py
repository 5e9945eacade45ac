"""Program: trains in several ways, and writes what the graphs of the steps copy to the host.

CPU:1 stands for a GPU, CPU:0 is the host. Arguments: folder for the results; JSON of the ways: for
each name, the options of the strategy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import tensorflow as tf
from copies_to_host import graphs_of
from recorded import arrays
from recording import small_model

import keras_het
from keras_het.launch.benchmark_trial_program import copies_to_host, steps_of
from keras_het.strategy.exact import keras_step

BATCH = 8


def main() -> None:
    folder, ways = Path(sys.argv[1]), json.loads(sys.argv[2])
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, parts)
    keras_step.works_ahead = lambda *_: True
    x, y = arrays(2 * BATCH)
    found = {}
    for name, options in ways.items():
        strategy = keras_het.HeterogeneousStrategy(["CPU:1"], [3, 1], **options)
        with strategy.scope():
            model = small_model(keras.optimizers.Adam(0.01))
        graphs = graphs_of(lambda: model.fit(x, y, batch_size=BATCH, verbose=0))  # noqa: B023
        steps = steps_of(graphs)
        assert steps
        found[name] = copies_to_host(steps)
    (folder / f"{strategy.worker_index}.json").write_text(json.dumps(found))


main()
