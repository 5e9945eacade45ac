"""Calls of Keras pass through our handlers for our models, and through nothing for all others."""

import traceback
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_het
from keras_het import HeterogeneousStrategy, PipelineStrategy
from keras_het.fit.session import FitSession

PACKAGE = str(Path(keras_het.__file__).parent)
X = np.arange(24, dtype="float32").reshape(8, 3) / 24
Y = X[:, :1]
OPTIONS = {"batch_size": 4, "verbose": 0}
CALLS = {
    "fit": lambda model: model.fit(X, Y, **OPTIONS).history["loss"],
    "evaluate": lambda model: model.evaluate(X, Y, **OPTIONS),
    "predict": lambda model: model.predict(X, **OPTIONS),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
    "predict_on_batch": lambda model: model.predict_on_batch(X),
    "get_weights": lambda model: model.get_weights(),
}


def small_model(strategy=None):
    keras.utils.set_random_seed(5)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def stock_model():
    return small_model(tf.distribute.MirroredStrategy(["CPU:0"]))


class Notes(keras.callbacks.Callback):
    """Notes the sessions in which it is called."""

    def __init__(self):
        super().__init__()
        self.sessions = []

    def on_train_batch_end(self, batch, logs=None):
        self.sessions.append(FitSession.of(self.model))


@pytest.mark.parametrize("make", [small_model, stock_model], ids=["no strategy", "stock"])
def test_a_model_of_others_passes_through_nothing(make, tmp_path, logical_devices):
    CALLS["fit"](small_model(HeterogeneousStrategy(devices=logical_devices[:2])))
    model, notes = make(), Notes()
    callbacks = keras.callbacks.CallbackList([notes], add_history=True, model=model)
    model.fit(X, Y, callbacks=callbacks, **OPTIONS)
    for name in ("train_on_batch", "predict_on_batch", "get_weights"):
        CALLS[name](model)
    model.save(tmp_path / "model.keras")
    assert (tmp_path / "model.keras").exists()
    assert notes.sessions == [None, None]
    assert callbacks.callbacks == [notes, model.history]


def results(strategy):
    model = small_model(strategy)
    return {name: call(model) for name, call in CALLS.items()}


@pytest.mark.full
def test_the_order_in_which_strategies_are_made_is_no_matter(logical_devices):
    makers = {
        "data": lambda: HeterogeneousStrategy(logical_devices[:2], share_weights=[3, 1]),
        "stages": lambda: PipelineStrategy(
            split_after=[], num_micro_batches=2, devices=logical_devices[:1]
        ),
    }
    found = {}
    for order in (("data", "stages"), ("stages", "data")):
        strategies = {name: makers[name]() for name in order}
        found[order] = {name: results(strategies[name]) for name in ("data", "stages")}
    first, second = found.values()
    for name in makers:
        for call in CALLS:
            tf.nest.map_structure(
                np.testing.assert_array_equal, first[name][call], second[name][call]
            )


class Fails(keras.callbacks.Callback):
    """Makes a mistake."""

    def on_train_batch_end(self, batch, logs=None):
        raise ZeroDivisionError("a mistake")


def test_the_traceback_of_a_mistake_is_short(logical_devices):
    model = small_model(HeterogeneousStrategy(devices=logical_devices[:2]))
    with pytest.raises(ZeroDivisionError) as raised:
        model.fit(X, Y, callbacks=[Fails()], **OPTIONS)
    frames = traceback.extract_tb(raised.value.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
    assert [frame.name for frame in ours] == ["handled"]
    assert frames[-1].line == 'raise ZeroDivisionError("a mistake")'


def test_a_call_that_keras_refuses_has_its_message(logical_devices):
    model = small_model(HeterogeneousStrategy(devices=logical_devices[:2]))
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        model.fit(X, Y, epoch=2)
