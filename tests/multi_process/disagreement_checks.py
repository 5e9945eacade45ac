"""Workers that do not do the same: what each of them is told. Worker 1 differs from the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from recording import Recording, check

import keras_het

ROWS = 24


def arrays(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 5)).astype("float32")
    return x, x[:, :1].copy()


def batches(*data: np.ndarray, size: int = 8) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data or arrays()).batch(size)


class Checked:
    """One worker's side of a disagreement.

    Args:
        run: where the message that it gets is kept.
    """

    def __init__(self, run: Recording) -> None:
        self._run = run
        self.strategy = run.strategy
        self.is_odd = self.strategy.worker_index == 1

    def model(self, units: int = 4, activation: str = "tanh", **compiled: Any) -> Any:
        with self.strategy.scope():
            layers = [keras.layers.Dense(units, activation=activation), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((5,)), *layers])
            model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
        return model

    @contextlib.contextmanager
    def refused(self, kind: type[Exception] = ValueError) -> Iterator[None]:
        try:
            yield
        except kind as error:
            self._run.keep("message", np.array(str(error)))
        else:
            raise AssertionError("nothing was refused")


def disagreement(function: Callable[[Checked], None]) -> Callable[[Checked], None]:
    def run_check(run: Recording) -> None:
        function(Checked(run))

    run_check.__name__ = function.__name__
    check(run_check)
    return function


def fits(is_odd: bool, worker: int, workers: int) -> dict[str, dict[str, Any]]:
    """Arguments of `fit` that differ on the odd worker, by the name of the check."""
    x, y = arrays()
    fewer_x, fewer_y = arrays(ROWS - 8 if is_odd else ROWS)
    samples = tf.data.Dataset.from_tensor_slices((x, y))
    odd_labels = tf.data.Dataset.from_tensor_slices((x, y + is_odd)).map(lambda x, y: (2 * x, y))
    factor = 2.0 + is_odd
    odd_map = samples.map(lambda x, y: (factor * x, y))
    balancers = [keras_het.callbacks.BatchBalancer()]
    bound = keras_het.callbacks.BatchBalancer(max_share=5 if is_odd else 9)
    return {
        "batch_size": {"x": x, "y": y, "batch_size": 10 if is_odd else 8},
        "epochs_and_steps": {
            "x": batches().repeat(),
            "epochs": 2 if is_odd else 1,
            "steps_per_epoch": 2 if is_odd else 3,
        },
        "rows_of_arrays": {"x": fewer_x, "y": fewer_y, "batch_size": 8},
        "types_of_arrays": {"x": x.astype("float64") if is_odd else x, "y": y, "batch_size": 8},
        "rows_in_arrays": {"x": x, "y": y + is_odd, "batch_size": 8},
        "rows_in_slices": {"x": odd_labels.shuffle(ROWS, seed=1).batch(8)},
        "what_a_map_makes": {"x": odd_map.shuffle(ROWS, seed=1).batch(8)},
        "shards": {"x": samples.repeat(workers).shard(workers, worker).batch(8)},
        "validation_data": {
            "x": x,
            "y": y,
            "batch_size": 8,
            "validation_data": (fewer_x, fewer_y),
        },
        "balancer": {"x": x, "y": y, "callbacks": balancers if is_odd else []},
        "settings_of_balancers": {"x": x, "y": y, "callbacks": [bound]},
        "batches_of_data": {"x": batches(fewer_x, fewer_y)},
    }


def disagreement_in_fit(name: str) -> None:
    def differs(its: Checked) -> None:
        strategy = its.strategy
        arguments = fits(its.is_odd, strategy.worker_index, strategy.num_workers)[name]
        with its.refused():
            its.model().fit(**arguments, verbose=0)

    differs.__name__ = name
    disagreement(differs)


# By name: to make the arguments is to use TensorFlow, before this process joins its cluster.
for _name in (
    *("batch_size", "epochs_and_steps", "rows_of_arrays", "types_of_arrays", "rows_in_arrays"),
    *("rows_in_slices", "what_a_map_makes", "shards", "validation_data", "balancer"),
    *("settings_of_balancers", "batches_of_data"),
):
    disagreement_in_fit(_name)


@disagreement
def sizes_of_layers(its: Checked) -> None:
    with its.refused():
        its.model(units=6 if its.is_odd else 4)


@disagreement
def number_of_layers(its: Checked) -> None:
    with its.refused(), its.strategy.scope():
        more = [keras.layers.Dense(5)] if its.is_odd else []
        layers = [keras.layers.Dense(5), *more]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile("sgd", "mse")
        model.fit(*arrays(), verbose=0)


@disagreement
def kinds_of_layers(its: Checked) -> None:
    model = its.model(activation="relu" if its.is_odd else "tanh")
    with its.refused():
        model.fit(*arrays(), verbose=0)


@disagreement
def optimizers_and_losses(its: Checked) -> None:
    optimizer = keras.optimizers.SGD(0.5 if its.is_odd else 0.1)
    model = its.model(optimizer=optimizer, loss="mae" if its.is_odd else "mse")
    with its.refused():
        model.fit(*arrays(), verbose=0)


@disagreement
def learning_rates(its: Checked) -> None:
    with its.refused(), its.strategy.scope():
        keras.optimizers.Adam(0.5 if its.is_odd else 0.1)


@disagreement
def weights(its: Checked) -> None:
    model = its.model()
    if its.is_odd:
        model.set_weights([np.array(weight) * 1.5 for weight in model.weights])
    with its.refused():
        model.fit(*arrays(), verbose=0)


@disagreement
def shares(its: Checked) -> None:
    count = its.strategy.num_replicas_in_sync
    model = its.model()
    its.strategy.set_share_weights([2 if its.is_odd else 1, *[1] * (count - 1)])
    try:
        with its.refused():
            model.fit(*arrays(), verbose=0)
    finally:
        its.strategy.set_share_weights([1] * count)


@disagreement
def single_batches(its: Checked) -> None:
    model = its.model()
    with its.refused():
        model.train_on_batch(*arrays(ROWS - 8 if its.is_odd else ROWS))


@disagreement
def different_calls(its: Checked) -> None:
    model = its.model()
    with its.refused():
        (model.evaluate if its.is_odd else model.fit)(*arrays(), verbose=0)


@disagreement
def barrier(its: Checked) -> None:
    model = its.model()
    with its.refused():
        its.strategy.barrier() if its.is_odd else model.fit(*arrays(), verbose=0)


@disagreement
def stop_after_an_epoch(its: Checked) -> None:
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = its.is_odd and epoch == 1

    with its.refused():
        its.model().fit(*arrays(), batch_size=8, epochs=4, verbose=0, callbacks=[Stop()])


@disagreement
def metrics_after_an_epoch(its: Checked) -> None:
    class Read(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.get_metrics_result()  # all of them
            if its.is_odd:
                self.model.get_metrics_result()

    with its.refused():
        its.model().fit(*arrays(), batch_size=8, verbose=0, callbacks=[Read()])


@disagreement
def no_batch_at_all(its: Checked) -> None:
    keep = not its.is_odd
    data = tf.data.Dataset.from_tensor_slices(arrays()).filter(lambda x, y: keep).batch(8)
    with its.refused():
        its.model().fit(data, verbose=0)


@disagreement
def nothing_for_anybody(its: Checked) -> None:
    data = tf.data.Dataset.from_tensor_slices(arrays()).filter(lambda x, y: False).batch(8)
    with its.refused():
        its.model().fit(data, verbose=0)
    with its.refused():
        its.model().evaluate(batches().take(0), verbose=0)


@disagreement
def model_outside(its: Checked) -> None:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with its.refused():
        model.fit(*arrays(), verbose=0)
    with its.refused(), its.strategy.scope():
        model.train_on_batch(*arrays())
    model.evaluate(*arrays(), verbose=0)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        own = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        own.compile("sgd", "mse")
    own.fit(*arrays(), verbose=0)


@disagreement
def nothing(its: Checked) -> None:
    model = its.model()
    x, y = arrays()
    model.fit(x, y, epochs=2, batch_size=8, validation_data=(x, y), verbose=0)
    model.fit(batches().map(lambda x, y: (x * 2, y)), verbose=0)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    model.train_on_batch(x, y)
    model.fit(batches().filter(lambda x, y: True), verbose=0)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[keras_het.callbacks.BatchBalancer()])
    with its.refused(AssertionError):
        raise AssertionError("nothing differs")
