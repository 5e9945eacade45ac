"""A step sends nothing to the host: on a GPU the host would wait for all steps before."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from copies_to_host import conditions, graphs_of
from devices import DEVICES

import keras_het
from keras_het.launch.benchmark_trial_program import copies_to_host, steps_of


@pytest.mark.quick("2")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_steps_copy_nothing_to_the_host(num_devices):
    strategy = keras_het.HeterogeneousStrategy(devices=DEVICES[1 : 1 + num_devices])
    with strategy.scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(3)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.1)(hidden)))
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    loops = {
        "fit": lambda: model.fit(x, x[:, :1], batch_size=8, verbose=0),
        "evaluate": lambda: model.evaluate(x, x[:, :1], batch_size=8, verbose=0),
        "predict": lambda: model.predict(x, batch_size=8, verbose=0),
    }
    for name, loop in loops.items():
        graphs = graphs_of(loop)
        steps = steps_of(graphs)
        assert steps
        assert not copies_to_host(steps), name
        decided = list(conditions(graphs))
        assert bool(decided) == (num_devices > 1)
        for branch, decision in decided:
            # a GPU compares these on its host, and others on itself
            assert decision.attr["T"].type == tf.int32.as_datatype_enum, (name, branch)
