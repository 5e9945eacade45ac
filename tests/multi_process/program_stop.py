"""Program: trains, or does something else, until it ends or is ended.

Its single argument is a JSON object: "mode" ("fit", "evaluate", "predict", "custom_loop",
"wait_at_start", "handler", "fork"), "backup" (a path, with {} for the worker's index), "save_freq",
"result" (a path for the variables at the end), "validate", "input" (a kind), "shares", and one
value, or a list of one for each worker: "waits_at" (a row of the data that never comes),
"signal_at" (its signal at a step, the number of the step), "signal", "fails_at" and "stuck_at" (a
step in which it fails, or stays), "stuck_after" (an epoch at whose end it stays), "saves_at" (a
step after which it saves), "killed_before" (a file operation, counted from the first save on,
before which the chief is killed), "reads_late" (only the chief reads its backup at once),
"elastic" (the backup is an `ElasticBackup`), "remembers" (callbacks of Keras that do, and the
result has the history), "lag" (of late reads, as if devices worked ahead). With "plan", stages of
numbers of devices, the workers train a pipeline.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from file_operations import Watch
from recorded import arrays
from recording import save_variables, small_model, train_in_a_loop

import keras_het
from keras_het.fit.backup_folder import BackupFolder
from keras_het.planning.pipeline import PipelinePlan, Stage
from keras_het.strategy.cluster import stop_request
from keras_het.strategy.measure.late_reads import LateReads

OPTIONS = json.loads(sys.argv[1])
TASK = json.loads(os.environ.get("TF_CONFIG") or '{"task": {"type": "worker", "index": 0}}')["task"]
PLACE = TASK["index"] + (TASK["type"] == "async")
FOR_EVER = 10_000_000


def option(name: str) -> Any:
    value = OPTIONS.get(name)
    return value[PLACE] if isinstance(value, list) else value


class Happens(keras.callbacks.Callback):
    """What happens to this worker at a step of training or validation."""

    step = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        if self.step == 5:
            print("training", flush=True)
        if self.step == option("signal_at"):
            os.kill(os.getpid(), option("signal") or signal.SIGTERM)
        if self.step == option("fails_at"):
            raise InterruptedError("the power went out")
        if self.step == option("saves_at"):
            self.model.save_weights("mine.weights.h5")
        print(f"step {self.step}", flush=True)
        if self.step == option("stuck_at"):
            print("stuck", flush=True)
            threading.Event().wait()

    on_predict_batch_end = on_train_batch_end

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == option("stuck_after"):
            threading.Event().wait()


class HappensInValidation(Happens):
    on_test_batch_end = Happens.on_train_batch_end

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts no steps of training."""


def slow(arrays_of_data: Any) -> Any:
    """Batches of 8 of rows of which one may never come."""
    x, y = arrays_of_data

    def rows() -> Any:
        for number in range(len(x)):
            if number == option("waits_at"):
                threading.Event().wait()
            yield x[number], y[number]

    specs = tuple(tf.TensorSpec(each.shape[1:], each.dtype) for each in (x, y))
    return tf.data.Dataset.from_generator(rows, output_signature=specs).batch(8)


def model_with_state() -> Any:
    """A model whose steps change more than its weights."""
    layers = [keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def pipeline(plan: list[list[int]]) -> Any:
    """A strategy for a model of two layers, cut between them."""
    stages = tuple(
        Stage(number, number + 1, tuple(devices), tuple(m % len(devices) for m in range(2)))
        for number, devices in enumerate(plan)
    )
    memory = (0.0,) * (1 + max(device for devices in plan for device in devices))
    return keras_het.PipelineStrategy(
        None, 2, ["CPU:0"], plan=PipelinePlan(stages, 2, "1f1b", 0.0, memory)
    )


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return tuple(part[8 * index : 8 * index + 8] for part in arrays(44))


def inputs() -> dict[str, Any]:
    """What the model is fitted to."""
    kind = option("input")
    x, y = arrays(44)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(44, seed=3)
    whole = data.batch(8)
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": 8, "validation_data": (x[:8], y[:8])}
    if kind == "PyDataset":
        return {"x": Batches(workers=2)}
    if kind == "unknown size":
        return {"x": data.filter(lambda *_: True).batch(8)}
    if "waits_at" not in OPTIONS:
        return {"x": whole, "validation_data": whole if option("validate") else None}
    if option("validate"):
        return {"x": whole, "validation_data": slow((x, y))}
    return {"x": slow((x, y))}


def killed_before(operation: int, backup: str) -> Watch:
    """A context in which the process is killed before a file operation below `backup`."""

    def look(number: int) -> None:
        if number == operation:
            print("killed before", watch.seen[-1], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    watch = Watch(Path(backup), look)
    return watch


def read_late() -> None:
    """Let this worker read its backup after the chief has deleted it, or has had the time to."""
    restore = BackupFolder.restore

    def late(folder: BackupFolder, model: keras.Model) -> Any:
        end = time.monotonic() + 3.0
        while folder.newest is not None and folder.newest.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return restore(folder, model)

    BackupFolder.restore = late  # type: ignore[method-assign]


def fork_a_child() -> None:
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    os.kill(child, signal.SIGTERM)
    print("child ended by", os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)


def main() -> None:
    mode = option("mode")
    if mode == "handler":
        signal.signal(signal.SIGTERM, lambda *_: print("my own handler", flush=True))
    if lag := option("lag"):
        stop_request.LateReads = lambda *_: LateReads(lag)  # type: ignore[misc, assignment]
    plan = option("plan") and json.loads(option("plan"))
    strategy = pipeline(plan) if plan else keras_het.HeterogeneousStrategy()
    if option("shares"):
        strategy.set_share_weights(OPTIONS["shares"][: strategy.num_workers])
    if option("reads_late") and not strategy.is_chief:
        read_late()
    keras.utils.set_random_seed(7)
    print("joined", flush=True)
    if mode == "wait_at_start" and strategy.is_chief:
        print("stuck", flush=True)
        threading.Event().wait()
    if mode == "fork":
        fork_a_child()
    with strategy.scope():
        model = small_model(keras.optimizers.SGD(0.1, momentum=0.9))
        if "waits_at" in OPTIONS:
            model = model_with_state()
    fitted = inputs()
    if mode == "custom_loop":
        at_step = Happens().on_train_batch_end
        train_in_a_loop(strategy, model, fitted["x"].repeat(), at_step)
    if mode == "evaluate":
        happens = HappensInValidation()
        model.evaluate(fitted["x"].repeat(), steps=FOR_EVER, verbose=0, callbacks=[happens])
    if mode == "predict":
        x, _ = arrays(44)
        endless = tf.data.Dataset.from_tensor_slices(x).batch(8).repeat()
        model.predict(endless, steps=FOR_EVER, verbose=0, callbacks=[Happens()])
    callbacks: list[Any] = [HappensInValidation() if option("validate") else Happens()]
    if option("remembers"):
        stopping = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
        rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        callbacks += [stopping, rate]
    if backup := option("backup"):
        backup = backup.format(strategy.worker_index)
        save_freq = option("save_freq") or "epoch"
        place = len(callbacks) if option("backup_last") else 0
        own = keras_het.callbacks
        kind = own.ElasticBackup if option("elastic") else own.BackupAndRestore
        callbacks.insert(place, kind(backup, save_freq))
    if local := option("local"):
        callbacks.append(keras_het.callbacks.LocalTraining(local))
    if TASK["type"] == "async" or option("hybrid"):
        callbacks.append(keras_het.callbacks.AsyncWorkers(timeout_seconds=10))
    watch: Any = contextlib.nullcontext()
    if option("killed_before") and strategy.is_chief:
        watch = killed_before(option("killed_before"), backup)
    try:
        with watch:
            epochs = option("epochs") or FOR_EVER
            history = model.fit(**fitted, epochs=epochs, verbose=0, callbacks=callbacks)
    except BaseException as error:
        print(f"raised {type(error).__name__} after {callbacks[0].__class__.__name__}", flush=True)
        raise
    print("trained", flush=True)
    if (result := option("result")) and strategy.is_chief:
        more = {f"history_{name}": numbers for name, numbers in history.history.items()}
        save_variables(model, result, **(more if option("remembers") else {}))


main()
