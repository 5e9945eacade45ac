"""Program: one worker of a cluster that trains until something happens to it.

Its single argument is a JSON object: "steps" of training, "shares", how long it waits for others
("startup_timeout_seconds"), how many workers it watches beside worker 0 ("most_watched"),
"gradient_reduction" (a task of the job "summation" is a machine that sums), what this worker
does ("raise_at", "hold_at", "exit_late", "lingers", "custom_loop", "predicts"), or what it does
wrong before training ("seed", "use_tensorflow_first"). Each may be a list with one entry a worker.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from recording import train_in_a_loop

import keras_het
from keras_het.strategy.cluster import peer_watch
from keras_het.summation import machine

config = json.loads(os.environ.get("TF_CONFIG") or '{"task": {"index": 0}}')
PLACE = config["task"]["index"] + (
    config["task"].get("type") == "worker" and "chief" in config["cluster"]
)


def option(name: str) -> Any:
    value = json.loads(sys.argv[1]).get(name)
    return value[PLACE] if isinstance(value, list) else value


class AtStep(keras.callbacks.Callback):
    step = 0

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.on_train_batch_end(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        if self.step == 20:
            print("training", flush=True)
        if self.step == option("hold_at"):
            ctypes.PyDLL(None).sleep(10)  # no other thread of Python runs meanwhile
        if self.step == option("raise_at"):
            raise ZeroDivisionError("a mistake in a callback")


def at_step_of_a_loop(number: int) -> None:
    if number == 20:
        print("training", flush=True)


def main() -> None:
    if config["task"].get("type") == "summation":
        machine.serve_until_stopped()
        return
    if option("use_tensorflow_first"):
        print("used", float(tf.constant(1.0) + 1.0))
    if option("seed") is not None:
        keras.utils.set_random_seed(option("seed"))
    if option("most_watched") is not None:
        peer_watch.neighbours.__defaults__ = (option("most_watched"),)
    shares = option("shares")
    strategy = keras_het.HeterogeneousStrategy(
        share_weights=None if shares is None else [float(share) for share in shares.split(":")],
        startup_timeout_seconds=option("startup_timeout_seconds") or 300.0,
        gradient_reduction=option("gradient_reduction") or "all_reduce",
    )
    print(f"strategy of {strategy.num_workers} worker(s)", flush=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.arange(256, dtype="float32").reshape(64, 4) / 256
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(64).repeat().batch(8)
    if option("custom_loop"):
        train_in_a_loop(strategy, model, data, at_step_of_a_loop)
    try:
        options = {"verbose": 0, "callbacks": [AtStep()]}
        if option("predicts"):
            model.predict(data, steps=option("steps"), **options)
        model.fit(data, steps_per_epoch=option("steps"), epochs=1, **options)
    except BaseException as error:
        print(f"raised {type(error).__name__} at {time.time():.3f}", flush=True)
        if option("lingers"):
            threading.Event().wait()
        raise
    print("finished", flush=True)
    # Some work that only this worker has to do at the end.
    threading.Event().wait(option("exit_late") or 0)


main()
