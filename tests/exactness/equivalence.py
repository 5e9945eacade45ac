"""Trains one model twice, on one device and over unequal replicas, and compares everything.

The two runs add the same float32 numbers in another order. One sum of a batch then differs by about
1e-7 of its size, and the divisions of Adam and of normalisation layers raise that by one or two
orders of magnitude over the few steps of a test: hence `RTOL` and `ATOL`. A wrong weight of a
replica shows at 1e-2 and more (`test_negative_control.py`).

A quick run compares the training with the first of the shares only, and neither `evaluate` nor
`predict`, unless a trial says otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import devices
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import settings

from keras_het import HeterogeneousStrategy

DEVICES = devices.DEVICES[:3]
ALL_SHARES = ((3, 0, 5), (4, 2, 1), (1, 0, 0), (0, 1, 0), (1, 1, 1))
# Unequal, and one replica without samples; the tests of the core use all.
SHARES = ((3, 0, 5), (4, 2, 1))
IS_QUICK = settings.default is settings.get_profile("quick")
RTOL = 1e-4
ATOL = 2e-6
IS_KERAS_3_16 = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 16)
# In Keras 3.16 one device counts a smaller last batch as one sample in the loss of each of several
# outputs, since it weighs them by the size that its trace knows.
ONLY_WHOLE_BATCHES = IS_KERAS_3_16

# Sparse tensors and Python functions have no kernels of XLA, on one device either; a size that
# comes for the first time draws the random numbers of TensorFlow's own kernels.
needs_no_xla = pytest.mark.skipif(devices.XLA, reason="not with XLA")

Fit = Callable[[Any, list[Any]], Any]


@functools.cache
def three_replicas():
    """The strategy of one process with three replicas; all tests share it."""
    return HeterogeneousStrategy(devices=DEVICES)


@functools.cache
def in_parts(size=2, number=3):
    """The same with shares that are computed in parts of so many samples at most."""
    return HeterogeneousStrategy(devices=DEVICES[:number], micro_batch_size=size)


whole_and_in_parts = pytest.mark.parametrize(
    "replicas", [three_replicas, in_parts], ids=["whole", "parts"]
)


class CountsTraces(keras.layers.Layer):
    """Python runs in it only while a step is traced."""

    traces = 0

    def call(self, inputs):
        type(self).traces += 1
        return inputs


class StepLogs(keras.callbacks.Callback):
    """Keeps the logs of every call of `on_train_batch_end`, as the progress bar gets them."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({"batch": batch, **{k: np.array(v) for k, v in (logs or {}).items()}})


@dataclasses.dataclass
class Outcome:
    """All that a user can see of a training run."""

    weights: list[np.ndarray]
    optimizer: list[np.ndarray]
    steps: list[dict[str, Any]]
    history: dict[str, list[Any]]
    evaluation: Any = None
    predictions: Any = None


@dataclasses.dataclass
class Trial:
    """A way to train and look at a model.

    Args:
        build: makes the compiled model; called without and within the strategy's scope.
        data: makes the `tf.data.Dataset` of global batches.
        fit: trains the model with the callbacks it is given; default: `fit` on `data`, two epochs.
        evaluate: whether to compare `evaluate` on `data`.
        predict: whether to compare `predict` on `data`.
        infer_always: whether to compare them for every share, not for the first only. Then a quick
            run has all shares, too.
        distribute: how the dataset of the replicated run is made.
        replica_state: whether every replica must hold the same value of every variable.
        options: further arguments of `fit`.
    """

    build: Callable[[], Any]
    data: Callable[[], Any] = lambda: batches()
    fit: Fit | None = None
    evaluate: bool = not IS_QUICK
    predict: bool = not IS_QUICK
    infer_always: bool = False
    distribute: Callable[[Any, Any], Any] = lambda strategy, data: strategy.distribute(data)
    replica_state: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def train(self, model, data, inference):
        recorder = StepLogs()
        if self.fit is None:
            result = model.fit(data, epochs=2, verbose=0, callbacks=[recorder], **self.options)
        else:
            result = self.fit(model, [recorder])
        history = getattr(result, "history", {})
        return Outcome(
            weights=values_of(model.weights),
            optimizer=values_of(optimizer_variables(model)),
            steps=recorder.logs,
            history={k: v for k, v in history.items()},
            evaluation=model.evaluate(data, verbose=0, return_dict=True)
            if self.evaluate and inference
            else None,
            predictions=model.predict(data, verbose=0) if self.predict and inference else None,
        )


def said(caplog):
    """The messages of keras_het."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("keras_het")]


def optimizer_variables(model):
    optimizers = [
        value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)
    ]
    compiled = [model.optimizer] if getattr(model, "optimizer", None) is not None else []
    unique = {id(optimizer): optimizer for optimizer in [*compiled, *optimizers]}
    return [variable for optimizer in unique.values() for variable in optimizer.variables]


def values_of(variables):
    return [np.array(variable) for variable in variables]


def batches(samples=22, features=5, outputs=1, size=8, seed=0):
    """Global batches of a regression task; the last one is partial (22 = 8 + 8 + 6)."""
    return tf.data.Dataset.from_tensor_slices(arrays(samples, features, outputs, seed)).batch(size)


def arrays(samples=22, features=5, outputs=1, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(samples, features)).astype("float32")
    y = random.normal(size=(samples, outputs)).astype("float32") + 0.5
    return x, y


def masked_words():
    """Global batches of sentences of one to four words, zeros behind them."""
    random = np.random.default_rng(7)
    words = random.integers(1, 9, (22, 4)).astype("int32")
    words[np.arange(4) >= random.integers(1, 5, 22)[:, None]] = 0
    return tf.data.Dataset.from_tensor_slices((words, arrays()[1])).batch(8)


def reset(model, initial):
    """Puts a model that has been trained back to its start, without a new trace."""
    for variable, value in zip(all_variables(model), initial, strict=True):
        variable.assign(value)


def all_variables(model):
    return [*model.variables, *optimizer_variables(model)]


def build_seeded(build):
    keras.utils.set_random_seed(7)
    return build()


def assert_equivalent(
    trial,
    shares=SHARES,
    rtol=RTOL,
    atol=ATOL,
    strategy=None,
):
    """Fails unless training over every one of `shares` gives what one device gives.

    Returns:
        What one device gave.
    """
    keras.backend.clear_session()
    strategy = strategy or three_replicas()
    with strategy.scope():
        replicated = build_seeded(trial.build)
        build_optimizers(replicated)
    single = build_seeded(trial.build)
    build_optimizers(single)
    start = values_of(single.weights)
    data = trial.data()
    expected = trial.train(single, data, inference=True)
    assert np.isfinite(np.concatenate([w.ravel() for w in expected.weights])).all()
    assert_trained(expected, start)
    initial = values_of(all_variables(replicated))
    # One pipeline for all runs: making one takes longer than training these models.
    distributed = trial.distribute(strategy, data)
    if IS_QUICK and not trial.infer_always:
        shares = shares[:1]
    for position, weights in enumerate(shares):
        strategy.set_share_weights(weights)
        reset(replicated, initial)
        keras.utils.set_random_seed(7)
        inference = position == 0 or trial.infer_always
        actual = trial.train(replicated, distributed, inference)
        try:
            assert_same_outcome(actual, expected, rtol, atol)
            if trial.replica_state:
                assert_replicas_agree(strategy, replicated)
        except AssertionError as error:
            raise AssertionError(f"shares {weights}: {error}") from error
    return expected


def build_optimizers(model):
    """Creates the optimizer's variables before training, so that they can be put back."""
    if model.built and getattr(model, "optimizer", None) is not None:
        model.optimizer.build(model.trainable_variables)


def assert_trained(outcome, start):
    moved = [
        np.abs(np.float64(a) - np.float64(b)).max(initial=0.0)
        for a, b in zip(outcome.weights, start, strict=False)
    ]
    # a model that its first batch builds has no start to compare with
    assert not moved or max(moved) > 1e-3, "training changed nothing: the comparison would be empty"
    assert outcome.steps, "no step was logged"


def assert_same_outcome(actual, expected, rtol, atol):
    assert len(actual.steps) == len(expected.steps)
    for got, want in zip(actual.steps, expected.steps, strict=True):
        assert got.keys() == want.keys(), (got, want)
        for key in want:
            close(got[key], want[key], rtol, atol, f"log {key!r} of step {want['batch']}")
    compare_lists(actual.weights, expected.weights, rtol, atol, "weight")
    compare_lists(actual.optimizer, expected.optimizer, rtol, atol, "optimizer variable")
    assert actual.history.keys() == expected.history.keys()
    for key in expected.history:
        close(actual.history[key], expected.history[key], rtol, atol, f"history of {key!r}")
    if actual.evaluation is not None:
        compare_structures(actual.evaluation, expected.evaluation, rtol, atol, "evaluate")
    if actual.predictions is not None:
        compare_structures(actual.predictions, expected.predictions, rtol, atol, "predict")


def compare_lists(actual, expected, rtol, atol, what):
    assert len(actual) == len(expected), f"number of {what}s"
    for position, (got, want) in enumerate(zip(actual, expected, strict=True)):
        close(got, want, rtol, atol, f"{what} {position} of shape {np.shape(want)}")


def assert_all_close(actual, expected, rtol=RTOL, atol=ATOL):
    compare_lists(actual, expected, rtol, atol, "value")


def compare_structures(actual, expected, rtol, atol, what):
    keras.tree.assert_same_structure(actual, expected)
    compare_lists(keras.tree.flatten(actual), keras.tree.flatten(expected), rtol, atol, what)


def close(actual, expected, rtol, atol, what):
    if isinstance(expected, tf.RaggedTensor):
        np.testing.assert_array_equal(actual.row_splits, expected.row_splits, what)
        actual, expected = actual.flat_values, expected.flat_values
    actual, expected = np.array(actual), np.array(expected)
    if actual.dtype == np.uint32 or actual.dtype.kind in "iub":
        np.testing.assert_array_equal(actual, expected, err_msg=what)
    else:
        np.testing.assert_allclose(
            np.float64(actual), np.float64(expected), rtol=rtol, atol=atol, err_msg=what
        )


def assert_replicas_agree(strategy, model):
    for variable in [*model.weights, *optimizer_variables(model)]:
        first, *others = [np.array(v) for v in strategy.experimental_local_results(variable.value)]
        for other in others:
            # Sparse updates of a GPU add in an order of their own, each time another one.
            np.testing.assert_allclose(
                first,
                other,
                rtol=1e-5 if devices.TYPE == "GPU" else 0.0,
                atol=1e-7 if devices.TYPE == "GPU" else 0.0,
                err_msg=f"replicas of {variable.path}",
            )


def dense_model(
    loss="mse",
    optimizer=None,
    layers=None,
    features=5,
    **compile_options,
):
    """A small network, compiled; `layers` are built again by a callable where given."""
    hidden = layers() if callable(layers) else [keras.layers.Dense(4, activation="tanh")]
    model = keras.Sequential([keras.Input((features,)), *hidden, keras.layers.Dense(1)])
    chosen = optimizer() if callable(optimizer) else keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(
        chosen, loss() if isinstance(loss, type | functools.partial) else loss, **compile_options
    )
    return model
