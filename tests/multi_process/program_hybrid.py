"""Program: trains with async workers and writes what each task did.

Arguments: folder for the results, JSON of options: `OWN`; the others are those of
`AsyncWorkers`. "validates" is the number of batches, -1 for all of them;
tasks of the job "without_callback" leave the callback to the strategy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import registered_rule  # noqa: F401 - some tests name it
import tensorflow as tf
from recording import counted_compilations

import keras_het
from keras_het import rules
from keras_het.callbacks import AsyncWorkers
from keras_het.fit.session import FitSession

SAMPLES, BATCH = 360, 12
OWN = {
    "rule": "delta",
    "epochs": 3,
    "rate": 0.02,
    "momentum": 0.0,
    "steps_per_execution": 1,
    "jit_compile": "auto",
    "arrays": False,
    "validates": -1,
    "fits": 1,
    "backup": None,
    "telemetry": None,
    "without_callback": None,
}


class Recorded(keras.Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[int] = []
        self.inner = keras.Sequential(
            [keras.layers.Dense(8, activation="tanh"), keras.layers.BatchNormalization()]
        )
        self.head = keras.layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.inner(x, training=training))

    def train_step(self, data: Any) -> Any:
        x, y = data
        note = tf.numpy_function(self._note, [y[:, 1]], tf.int64)
        with tf.control_dependencies([note]):
            x = tf.identity(x)
        return super().train_step((x, y[:, :1]))

    def test_step(self, data: Any) -> Any:
        return super().test_step((data[0], data[1][:, :1]))

    def _note(self, ids: Any) -> Any:
        self.seen += [int(i) for i in ids if i >= 0]
        return np.int64(len(self.seen))


class Notes(keras.callbacks.Callback):
    """Notes the samples of each epoch and what the participant knows; writes each step's number."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.steps = 0
        self.counts: dict[str, Any] = {}
        self._path = path

    def get_state(self) -> None:
        """Each process notes its own epochs."""

    def set_state(self, state: None) -> None:
        pass

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        callbacks = FitSession.of(self.model).callbacks
        (hybrid,) = [each for each in callbacks if isinstance(each, AsyncWorkers)]
        self._participant = hybrid._participant

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        self._path.write_text(str(self.steps))  # the test waits for this

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(list(self.model.seen))
        self.model.seen.clear()

    def on_train_end(self, logs: Any = None) -> None:
        participant = self._participant
        self.counts = {
            "step_fraction": getattr(participant.rule, "step_fraction", None),
            "period": getattr(participant, "period", None),
        }
        center = getattr(participant, "center", None)
        if center is not None:
            self.counts |= {
                "claimed": center.ledger.claimed.tolist(),
                "used": center.ledger.used.tolist(),
                "versions": center.versions().tolist(),
            }


def arrays() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    x = random.normal(size=(SAMPLES, 6)).astype(np.float32)
    y = x @ np.arange(6, dtype=np.float32)[:, None]
    # the number of the sample rides with the label; -1 would be a row of zeros
    return x, np.concatenate([y, np.arange(SAMPLES, dtype=np.float32)[:, None]], axis=1)


def main() -> None:
    keras.config.disable_traceback_filtering()
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    own = SimpleNamespace(**{name: options.pop(name, value) for name, value in OWN.items()})
    rule = own.rule
    if isinstance(rule, dict) and rule.get("optimizer"):
        rule = rules.AsyncSGD(optimizer=keras.optimizers.get(rule["optimizer"]))
    strategy = keras_het.HeterogeneousStrategy()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = Recorded()
        optimizer = keras.optimizers.SGD(own.rate, own.momentum)
        options_of_steps = {"steps_per_execution": own.steps_per_execution}
        model.compile(optimizer, "mse", **options_of_steps, jit_compile=own.jit_compile)
        model.build((None, 6))
    config = strategy.extended.cluster_config
    name = f"{config.task_type}_{config.task_index}"
    x, y = arrays()
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=3).batch(BATCH)
    validation = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    hybrids = [AsyncWorkers(rule, **options)]
    if config.task_type == own.without_callback:
        hybrids.clear()
    notes = Notes(folder / f"{name}.step")

    backups = []
    if own.backup:
        backups = [keras_het.callbacks.BackupAndRestore(own.backup, delete_checkpoint=False)]
    watches = [keras_het.callbacks.Telemetry(own.telemetry)] if own.telemetry else []
    for _ in range(own.fits - 1):
        model.fit(data, epochs=own.epochs, verbose=0, callbacks=[*hybrids, notes])
    with counted_compilations() as compilations:
        history = model.fit(
            **({"x": x, "y": y, "batch_size": BATCH} if own.arrays else {"x": data}),
            epochs=own.epochs,
            verbose=0,
            validation_data=validation.take(own.validates) if own.validates else None,
            callbacks=[*hybrids, notes, *backups, *watches],
        )
    result = {
        "seen": notes.seen,
        "steps": notes.steps,
        "compiled": compilations["MatMul"],
        "history": history.history,
        "weights": [np.array(weight).tolist() for weight in model.get_weights()],
        **notes.counts,
    }
    (folder / f"{name}.json").write_text(json.dumps(result))


main()
