"""Lose a worker and gain a machine while a training continues, and get the numbers of one device.

    python recipes/elastic.py

Starts Ray with three nodes on this machine and trains with one worker on each. One worker is
killed; later a fourth node joins. Each sample has an input of its own to a layer whose gradient
counts how often the sample was used.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Several nodes start slowly on few cores.
os.environ["RAY_raylet_start_wait_time_s"] = "200"  # noqa: SIM112
os.environ["RAY_agent_register_timeout_ms"] = "200000"  # noqa: SIM112
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 240, 24, 60
RATE = 0.1
STEP_SECONDS = 0.2  # as a larger model would need; less when all has happened
STEPS_BETWEEN = 25
NUM_NODES = 3
LONGEST_SECONDS = 150


def train(config: dict[str, Any]) -> None:
    """Train; `ElasticBackup` is all that it needs on Ray."""
    import keras

    import keras_het

    folder = Path(config["folder"])
    strategy = keras_het.HeterogeneousStrategy()  # without workers: one device
    keras.utils.set_random_seed(0)
    features = np.random.default_rng(0).normal(size=(NUM_SAMPLES, 4)).astype("float32")
    target = np.sin(features[:, :1])
    with strategy.scope():
        which, given = keras.Input((NUM_SAMPLES,)), keras.Input((4,))
        count = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(which)
        hidden = keras.layers.Dense(8, "tanh")(given)
        model = keras.Model([which, given], [count, keras.layers.Dense(1)(hidden)])
        # The first loss has the gradient 1 / BATCH_SIZE for each sample that a step uses.
        losses = [lambda _, output: keras.ops.mean(output, -1), "mse"]
        model.compile(keras.optimizers.SGD(RATE), losses)

    class Steps(keras.callbacks.Callback):
        """Time of a step, and a note of each for those who look on."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(config["step_seconds"] if strategy.num_workers <= NUM_NODES else 0.02)
            step = int(model.optimizer.iterations.numpy())
            line = json.dumps([time.time(), step, strategy.num_workers, os.getpid()])
            with (folder / f"steps-{strategy.worker_index}").open("a") as file:
                file.write(line + "\n")

    model.fit(
        [np.eye(NUM_SAMPLES, dtype="float32"), features],
        [target, target],
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[keras_het.callbacks.ElasticBackup(str(folder / "backup")), Steps()],
    )
    if strategy.is_chief:
        np.savez(folder / "weights.npz", *model.get_weights())


class Watch:
    """Looks at the steps that workers note.

    Args:
        folder: where they do.
        training: the thread that waits for the end of the training.
    """

    def __init__(self, folder: Path, training: threading.Thread) -> None:
        self._folder, self._training = folder, training
        self._start = time.time()

    def say(self, text: str) -> None:
        print(f"{time.time() - self._start:4.0f} s  {text}", flush=True)

    def steps(self, worker: int = 0) -> list[list[Any]]:
        path = self._folder / f"steps-{worker}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def newest(self, worker: int = 0) -> list[Any]:
        return (self.steps(worker) or [[0.0, 0, 0, 0]])[-1]

    def wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_SECONDS
        while not is_so():
            if not self._training.is_alive() or time.monotonic() > deadline:
                sys.exit("The training has ended, or stands still.")
            time.sleep(0.2)

    def next_group(self, pid: int, stopped: float, why: str) -> None:
        """Wait for a group other than that of this chief, and say at which step it continues."""
        self.wait(lambda: self.newest()[3] != pid)
        first = next(step for step in self.steps() if step[3] == self.newest()[3])
        before = max(step[1] for step in self.steps() if step[3] == pid)
        repeated = f", {before + 1 - first[1]} repeated" if first[1] <= before else ""
        self.say(f"{first[2]} workers continue at step {first[1]}{repeated}")
        self.say(f"    {first[0] - stopped:.1f} s {why}")


def disturb(watch: Watch, add_node: Callable[[], object]) -> None:
    """Kill a worker, then add a node."""
    watch.wait(lambda: watch.newest()[1] >= STEPS_BETWEEN)
    _, _, count, chief = watch.newest()
    watch.say(f"{count} workers train, {NUM_SAMPLES} samples in steps of {BATCH_SIZE}")
    _, step, _, victim = watch.newest(1)
    os.kill(victim, signal.SIGKILL)
    watch.say(f"worker 1 is killed after step {step} (SIGKILL)")
    watch.next_group(chief, time.time(), "after the loss")

    step, chief = watch.newest()[1], watch.newest()[3]
    watch.wait(lambda: watch.newest()[1] >= step + STEPS_BETWEEN)
    watch.say("a fourth node joins")
    add_node()
    watch.wait(lambda: watch.newest()[3] != chief)
    last = [step for step in watch.steps() if step[3] == chief][-1]
    watch.next_group(chief, last[0], "after the last step of three")


def train_on_ray(folder: Path) -> None:
    try:
        import ray
        from ray.cluster_utils import Cluster
    except ImportError:
        sys.exit("This recipe needs Ray. Install it: pip install '.[ray]'")
    import keras_het.ray

    node = {"num_cpus": 4, "resources": {"het": 1}, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(NUM_NODES - 1):
            cluster.add_node(**node)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        trainer = keras_het.ray.KerasTrainer(
            train,
            num_workers=(1, NUM_NODES + 1),
            resources_per_worker={"het": 1},
            resize_interval_seconds=3,
            train_loop_config={"folder": str(folder), "step_seconds": STEP_SECONDS},
            run_config=ray.train.RunConfig(storage_path=str(folder / "ray")),
        )
        # Nodes are added in the main thread.
        training = threading.Thread(target=trainer.fit, daemon=True)
        training.start()
        watch = Watch(folder, training)
        watch.say(f"Ray has {NUM_NODES} nodes, all on this machine")
        disturb(watch, lambda: cluster.add_node(**node))
        training.join(LONGEST_SECONDS)
        watch.say(f"the training has ended after step {watch.newest()[1]}")
    finally:
        ray.shutdown()
        cluster.shutdown()


def load(folder: Path) -> list[np.ndarray]:
    with np.load(folder / "weights.npz") as arrays:
        return [arrays[name] for name in arrays.files]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        on_ray, alone = Path(name) / "ray", Path(name) / "alone"
        on_ray.mkdir()
        alone.mkdir()
        train_on_ray(on_ray)
        train({"folder": str(alone), "step_seconds": 0.0})
        weights, expected = load(on_ray), load(alone)
    uses = -next(each for each in weights if each.shape == (NUM_SAMPLES, 1)) * BATCH_SIZE / RATE
    print(f"Uses of a sample in {EPOCHS} epochs: {uses.min():.2f} to {uses.max():.2f}")
    difference = max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True))
    print(f"Largest difference of a weight from training on one device: {difference:.1e}")


if __name__ == "__main__":
    main()
