"""Kill training in the middle of an epoch, resume it, and get the uninterrupted result.

    python recipes/resume.py

Starts two workers three times: undisturbed; killed in the second epoch; and once more with the same
backup directory. The shuffle continues in the same order at the same global batch, so the weights
end up as if nothing had happened.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from keras_het.launch.local.failure_report import describe_failures, first_to_fail
from keras_het.launch.local.local_cluster import LocalCluster
from keras_het.launch.local.worker_process import WorkerResult

BATCH_SIZE = 56
EPOCHS = 3
SAVE_EVERY = 5  # Steps. 26 of them make an epoch, so backups fall into the middle of it.
KILL_AFTER = 38  # Steps: in the second epoch, three steps after a backup.
TIMEOUT_SECONDS = 300


def train(backups: Path, result: Path, kill_after: int | None) -> None:
    """Train; nothing in it knows whether it is the first start or the second."""
    import keras
    from digits import global_batches, load_digits, make_model

    import keras_het

    class Kill(keras.callbacks.Callback):
        """End of this process, as by lack of memory or loss of the machine."""

        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

    strategy = keras_het.HeterogeneousStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_model()
    (images, labels), _ = load_digits()
    # The directory is the same for all workers; only the chief writes.
    backup = keras_het.callbacks.BackupAndRestore(str(backups), save_freq=SAVE_EVERY)
    callbacks = [backup, Kill()] if strategy.is_chief else [backup]
    model.fit(
        global_batches(images, labels, BATCH_SIZE), epochs=EPOCHS, verbose=0, callbacks=callbacks
    )
    if strategy.is_chief:
        np.savez(result, *model.get_weights())


def start(
    workers: int, directory: Path, name: str, kill_after: int | None = None
) -> tuple[WorkerResult, ...]:
    """Start the workers, wait for their end and return how each ended."""
    command = [sys.executable, __file__, "--worker", "--backups", str(directory / f"backup-{name}")]
    command += ["--result", str(directory / f"{name}.npz")]
    if kill_after is not None:
        command += ["--kill-after", str(kill_after)]
    environment = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    cluster = LocalCluster(command, workers, env=environment, keep_lines=200)
    with cluster:
        return cluster.wait(timeout=TIMEOUT_SECONDS)


def start_successfully(workers: int, directory: Path, name: str) -> list[np.ndarray]:
    """Train to the end and return the weights."""
    results = start(workers, directory, name)
    if any(result.has_failed for result in results):
        sys.exit(describe_failures(results))
    with np.load(directory / f"{name}.npz") as arrays:
        return [arrays[key] for key in arrays.files]


def compare(workers: int, directory: Path) -> None:
    print("1. Training without interruption...", flush=True)
    expected = start_successfully(workers, directory, "undisturbed")
    print(f"2. Training that is killed after {KILL_AFTER} steps...", flush=True)
    killed = start(workers, directory, "interrupted", KILL_AFTER)
    failed = [result for result in killed if result.has_failed]
    if not failed:
        sys.exit("not killed")
    if first_to_fail(killed).exit_code != -signal.SIGKILL:
        sys.exit(describe_failures(killed))
    print(f"   {first_to_fail(killed).describe_exit()}", flush=True)
    print("3. The same command again...", flush=True)
    resumed = start_successfully(workers, directory, "interrupted")
    pairs = zip(resumed, expected, strict=True)
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    print(f"Largest difference of a weight from the uninterrupted training: {difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--backups", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill-after", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.backups, options.result, options.kill_after)
        return
    with tempfile.TemporaryDirectory() as directory:
        compare(options.workers, Path(directory))


if __name__ == "__main__":
    main()
