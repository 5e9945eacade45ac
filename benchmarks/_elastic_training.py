"""What each trainer of benchmarks/elastic.py runs on its workers: the same model, the same steps.

Each process writes when it began, what it has done since, and each step, to a file of its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH, WIDTH = 60, 64
# More steps than any case trains; all of one epoch.
NUM_STEPS = 100_000


class Log:
    """Events of this process, one JSON object a line.

    Args:
        folder: where the files of all processes are.
    """

    def __init__(self, folder: str) -> None:
        import psutil

        self._file = (Path(folder) / f"events-{os.getpid()}").open("a", buffering=1)
        self.note("process", time=psutil.Process().create_time())
        self.note("function")

    def note(self, event: str, **about: Any) -> None:
        line = {"event": event, "pid": os.getpid(), "time": time.time(), **about}
        self._file.write(json.dumps(line) + "\n")


def make_model(num_blocks: int) -> Any:
    """Return a narrow, deep network: nearly all of its first step is tracing."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    given = keras.Input((32,))
    x = layers.Dense(WIDTH)(given)
    for _ in range(num_blocks):
        y = layers.LayerNormalization()(layers.Dense(WIDTH)(x))
        x = layers.Add()([x, layers.Activation("gelu")(y)])
    return keras.Model(given, layers.Dense(1)(x))


def make_batches() -> Any:
    import tensorflow as tf

    batch = tf.ones((BATCH, 32)), tf.ones((BATCH, 1))
    return tf.data.Dataset.from_tensors(batch).repeat(NUM_STEPS)


def train(config: dict[str, Any]) -> None:
    """Train with `fit`; an `ElasticBackup` is all that this knows about interruptions."""
    import keras

    import keras_het

    log = Log(config["folder"])
    strategy = keras_het.HeterogeneousStrategy()
    log.note("strategy")
    with strategy.scope():
        model = make_model(config["num_blocks"])
        model.compile(keras.optimizers.Adam(1e-4), "mse")
    log.note("model")

    class Steps(keras.callbacks.Callback):
        """Time of a device's step, and a note of each."""

        def on_train_begin(self, logs: Any = None) -> None:
            log.note("restored")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(config["step_seconds"])
            step = int(self.model.optimizer.iterations.numpy())
            place = {"worker": strategy.worker_index, "num_workers": strategy.num_workers}
            log.note("step", step=step, **place)

    # the backup comes last, so that a noted step is one that was trained, not one that was saved
    elastic = keras_het.callbacks.ElasticBackup(str(Path(config["folder"]) / "backup"))
    model.fit(make_batches(), verbose=0, callbacks=[elastic, Steps()])


def train_mirrored(config: dict[str, Any]) -> None:
    """Train as TensorFlow's guides for MultiWorkerMirroredStrategy and Ray's for recovery do."""
    import keras
    import ray.train
    import tensorflow as tf

    log = Log(config["folder"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    log.note("strategy")
    with strategy.scope():
        model = make_model(config["num_blocks"])
        optimizer = keras.optimizers.Adam(1e-4)
        optimizer.build(model.trainable_variables)
        saved = tf.train.Checkpoint(model=model, optimizer=optimizer)
    log.note("model")
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved.read(str(Path(folder) / "weights")).assert_consumed()
    log.note("restored")

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean((model(x, training=True) - y) ** 2, -1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step_of_all(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    context = ray.train.get_context()
    place = {"worker": context.get_world_rank(), "num_workers": context.get_world_size()}
    for batch in strategy.experimental_distribute_dataset(make_batches()):
        loss = step_of_all(*batch)
        time.sleep(config["step_seconds"])
        step = int(optimizer.iterations.numpy())
        log.note("step", step=step, **place)
        if step % config["checkpoint_steps"] == 0:
            with tempfile.TemporaryDirectory() as folder:
                saved.write(str(Path(folder) / "weights"))  # all: it has a collective
                is_chief = context.get_world_rank() == 0
                checkpoint = ray.train.Checkpoint.from_directory(folder) if is_chief else None
                ray.train.report({"loss": float(loss)}, checkpoint=checkpoint)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
