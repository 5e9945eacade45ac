"""Checks of `LoaderTuner` on two workers that each move their own data path at their own steps."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from loader_training import EveryStep
from recorded import LOADER_EPOCHS, LOADER_ROWS, OWN
from recording import Recording, check, small_model

import keras_het
from keras_het.loader import Knobs


class Patient(keras.callbacks.Callback):
    """Lets no step begin while the worker's move is being prepared."""

    def __init__(self, tuner: Any) -> None:
        super().__init__()
        self._tuner = tuner

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        session = self._tuner._session
        if session is not None and session.change is not None:
            session.change[0].wait(60)


def train(run: Recording, in_slices: bool) -> None:
    used: list[int] = []
    lock = threading.Lock()

    def note(index: Any) -> Any:
        with lock:
            used.append(int(index))
        return index

    def features(index: Any) -> Any:
        # the order of the samples is that of these maps only where one sample is made at a time
        index = tf.ensure_shape(tf.numpy_function(note, [index], tf.int64), [])
        value = tf.cast(index, tf.float32) / LOADER_ROWS
        return tf.stack([value, value**2, value**3, tf.sin(value), tf.cos(value)]), value[None]

    def build(knobs: Knobs) -> tf.data.Dataset:
        rows = tf.data.Dataset.range(LOADER_ROWS).shuffle(30, seed=5)
        rows = rows.map(features, num_parallel_calls=knobs.num_parallel_calls)
        if in_slices:
            return rows.padded_batch(4, padded_shapes=([None], [None])).prefetch(knobs.prefetch)
        return rows.batch(4).prefetch(knobs.prefetch)

    run.set_share_weights([2, 1])
    model = run.build(lambda: small_model("sgd"))
    callbacks = []
    if run.strategy is not None:
        tuner = keras_het.callbacks.LoaderTuner(EveryStep)
        callbacks = [tuner, Patient(tuner)]
    data = keras_het.loader.tunable_pipeline(build, Knobs(2, 2, 2))
    model.fit(data, epochs=LOADER_EPOCHS, verbose=0, callbacks=callbacks)
    run.keep_model(model)
    if run.strategy is not None:
        run.keep(f"{OWN}moves", np.array([move.refused is None for move in tuner.moves]))
        run.keep(f"{OWN}reason", np.array(str(tuner.observe_only_reason)))
        run.keep(f"{OWN}used", np.array(used))


@check
def own_rows(run: Recording) -> None:
    train(run, in_slices=False)


@check
def whole_batches(run: Recording) -> None:
    train(run, in_slices=True)
