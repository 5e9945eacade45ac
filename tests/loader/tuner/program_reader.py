"""A training whose pipeline reads from a disk that others read from too, by its session.

Arguments: the file of the host, the file of the disk, loaders to begin with, which are the most
it may have, milliseconds of a step, io_budget. Prints a line for each change of its loaders
or of its part; ends with its standard input.

The disk is a file under a lock that says until when the disk is busy: each read queues behind those
of all processes, and takes `READ_SECONDS` of it. Nobody computes meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

from keras_het.loader import Knobs, pipeline
from keras_het.loader.host.budget import HostBudget
from keras_het.loader.tuning.session import TuningSession
from keras_het.planning.loader import TunerController

READ_SECONDS = 0.004
BATCH = 2


def read(disk: Path) -> None:
    """Reads one sample: waits for its turn, and until it is there."""
    # of its own for each read: two threads with one open file would share its lock
    file = os.open(disk, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        now = time.monotonic()
        busy = max(float(os.pread(file, 64, 0) or 0.0), now) + READ_SECONDS
        os.pwrite(file, f"{busy:<40.9f}".encode(), 0)
    finally:
        os.close(file)
    time.sleep(busy - now)  # the emulated disk


def make_build(disk: Path):
    def load(row):
        def once(row):
            read(disk)
            return row

        return tf.ensure_shape(tf.numpy_function(once, [row], tf.int64), [])

    def build(knobs):
        rows = tf.data.Dataset.range(10**9).map(load, knobs.num_parallel_calls)
        return rows.batch(BATCH).prefetch(knobs.prefetch)

    return build


def main(host: str, disk: str, loaders: int, step_ms: float, io_budget: int) -> None:
    tf.config.threading.set_inter_op_parallelism_threads(1)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    budget = HostBudget(path=Path(host), io_budget=io_budget)
    session = TuningSession(
        lambda plan, cpus, most: TunerController(plan, cpus, max_loaders=loaders), budget=budget
    )
    knobs = Knobs(2 * loaders, 2, loaders)
    live = session.open(iter(pipeline(make_build(Path(disk)), knobs)))
    told = None
    while not ended.is_set():
        start = time.perf_counter()
        (batch,) = live.take(1)
        np.asarray(batch)
        wait = live.input_wait_seconds
        time.sleep(step_ms / 1000.0)  # the emulated device
        session.after_step(time.perf_counter() - start, wait, 1)
        state = session.pipeline.knobs.threads, budget.reading_loaders
        if state != told:
            told = state
            sys.stdout.write(f"{state[0]} {state[1]}\n")
            sys.stdout.flush()
    session.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
