"""Checks of callbacks and saving on two workers; each runs in a working directory of its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np
from recorded import ONLY_WORKERS, OWN
from recording import Recording, batches, check, small_model

import keras_het
from keras_het.callbacks import bucket_tuner
from keras_het.strategy import keras_calls

MOST_EPOCHS = 12


class LearningRates(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.values.append(float(np.array(self.model.optimizer.learning_rate)))


@check
def decisions(run: Recording) -> None:
    run.set_share_weights([2, 1])
    model = run.build(lambda: small_model(keras.optimizers.SGD(0.2)))
    rates = LearningRates()
    decide = [
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.05),
        keras.callbacks.EarlyStopping(
            "val_loss", patience=3, min_delta=0.05, restore_best_weights=True
        ),
    ]
    run.fit(
        model,
        batches(),
        epochs=MOST_EPOCHS,
        validation_data=batches(15, 6),
        callbacks=[*decide, rates],
    )
    run.keep("rates", np.array(rates.values))


@check
def buckets(run: Recording) -> None:
    """The second worker's clock finds another size to be the fastest."""
    run.set_share_weights([2, 1])
    model = run.build(lambda: small_model("adam", keras.layers.Dense(64), keras.layers.Dense(64)))
    if run.strategy is None:
        run.fit(model, batches(), epochs=12)
        return
    now = 0.0

    def time_computed(logs: Any) -> float:
        nonlocal now
        size = run.strategy.extended.bytes_per_bucket
        chief, other = {0: 3.0, 4096: 1.0, 256: 2.0}, {0: 1.0, 4096: 2.0, 256: 3.0}
        now += chief[size] if run.strategy.is_chief else other[size]
        return now

    bucket_tuner._time_computed = time_computed
    tuner = keras_het.callbacks.BucketTuner([4096, 256], steps=1)
    run.fit(model, batches(), epochs=12, callbacks=[tuner])
    run.keep(f"{ONLY_WORKERS}chosen", tuner.size)
    run.keep(f"{ONLY_WORKERS}seconds", list(tuner.step_seconds.values()))


@check
def files(run: Recording) -> None:
    run.set_share_weights([2, 1])
    model = run.build(lambda: small_model("adam"))
    callbacks = [
        keras.callbacks.ModelCheckpoint("every-{epoch}.keras"),
        keras.callbacks.ModelCheckpoint(
            "best.weights.h5", monitor="loss", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.TensorBoard("tensorboard"),
        keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False),
    ]
    if run.strategy is not None:
        backup = keras_het.callbacks.BackupAndRestore("het_backup", 2, delete_checkpoint=False)
        callbacks.append(backup)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("keras_het").addHandler(handler)
    keras_calls._say_once.cache_clear()
    run.fit(model, batches(), validation_data=batches(15, 6), callbacks=callbacks)
    model.save("final.keras")
    model.save("final.keras")
    model.save_weights("final.weights.h5")
    logging.getLogger("keras_het").removeHandler(handler)
    run.keep(f"{OWN}nothing_done", np.sum(["does nothing" in message for message in messages]))
    # What was saved is the model of all workers; it loads without the cluster.
    if Path("final.keras").exists():
        loaded = keras.saving.load_model("final.keras")
        for position, (mine, saved) in enumerate(zip(model.weights, loaded.weights, strict=True)):
            run.keep(f"{OWN}difference_{position}", np.abs(np.array(mine) - np.array(saved)).max())
    run.keep("evaluate", model.evaluate(batches(), verbose=0))


@check
def telemetry(run: Recording) -> None:
    run.set_share_weights([2, 1])
    model = run.build(lambda: small_model("adam"))
    if run.strategy is None:
        model.fit(batches(), epochs=2, verbose=0)
    else:
        watch = keras_het.callbacks.Telemetry("telemetry")
        history = model.fit(batches(), epochs=2, verbose=0, callbacks=[watch])
        rows = watch.recording()
        run.keep(f"{ONLY_WORKERS}steps", rows.steps)
        run.keep(f"{ONLY_WORKERS}shares", rows.shares)
        run.keep(f"{ONLY_WORKERS}compute", rows.compute)
        run.keep(f"{OWN}names", np.array([device.name for device in rows.devices]))
        identities = [device.identity for device in rows.devices]
        run.keep(f"{OWN}identities", np.array(identities))
        run.keep(f"{OWN}hosts", np.array([device.host for device in rows.devices]))
        run.keep(f"{OWN}models", np.array([device.model for device in rows.devices]))
        run.keep(f"{OWN}in_history", "samples_per_second" in history.history)
    run.keep_model(model)


@check
def telemetry_of_local_training(run: Recording) -> None:
    model = run.build(lambda: small_model("sgd"))
    if run.strategy is None:
        return
    watch = keras_het.callbacks.Telemetry()
    local = keras_het.callbacks.LocalTraining(period=2)
    history = model.fit(batches(), epochs=2, verbose=0, callbacks=[watch, local])
    rows = watch.recording()
    run.keep(f"{OWN}steps", rows.steps)
    run.keep(f"{OWN}compute", rows.compute)
    run.keep(f"{OWN}shares", rows.shares)
    run.keep(f"{OWN}in_history", "samples_per_second" in history.history)
