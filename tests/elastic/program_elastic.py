"""A training on Ray nodes of this machine, which is disturbed in ways that a test chooses.

Arguments: a folder, and a JSON object

    nodes: number of nodes with a worker each
    on_head: number of workers on the head node
    step_seconds: the shortest time of a step
    least: the least number of workers
    events: what happens to the group, one after the other, each while it trains
    shares_nothing: whether each node has a disk and a memory of its own
    hosts: address of this host, then of one for another node, and the command that runs there
    dies: phase of the training in which worker 1 ends itself, once; "step N" after that step
    remembers: whether callbacks take part whose results depend on all epochs
    fails: step at which worker 1 raises an error

Each sample has an input of its own to a layer whose gradient counts how often it was used.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

NUM_SAMPLES, BATCH, EPOCHS = 240, 24, 12
RATE = 0.1
NUM_STEPS = NUM_SAMPLES // BATCH * EPOCHS
STEPS_BETWEEN_EVENTS = 7
LONGEST_SECONDS = 240.0
SHARED = "shared"
ALWAYS = ("always", "start")


def model_and_data():
    import keras
    import numpy as np

    generator = np.random.default_rng(0)
    features = generator.normal(size=(NUM_SAMPLES, 4)).astype(np.float32)
    target = np.sin(features[:, :1])
    which, given = keras.Input((NUM_SAMPLES,)), keras.Input((4,))
    count = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="count")(which)
    hidden = keras.layers.Dense(8, "tanh")(given)
    model = keras.Model([which, given], [count, keras.layers.Dense(1, name="out")(hidden)])
    model.compile(keras.optimizers.SGD(RATE), loss=[mean_output, "mse"])
    return model, [np.eye(NUM_SAMPLES, dtype=np.float32), features], [target, target]


def mean_output(y, p):
    import keras

    return keras.ops.mean(p, axis=-1)


def fit(model, x, y, callbacks, folder=None):
    """Train; with a folder, with callbacks of Keras whose results depend on all epochs."""
    import keras

    if folder is not None:
        worse = {"monitor": "val_loss", "mode": "max"}  # the first epoch is the best one
        best = {"save_best_only": True, "save_weights_only": True}
        callbacks = [
            keras.callbacks.EarlyStopping(**worse, patience=6, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.7, patience=2, min_delta=0.02),
            keras.callbacks.ModelCheckpoint(folder / "best.weights.h5", **worse, **best),
            keras.callbacks.CSVLogger(str(folder / "rows.csv")),
            *callbacks,
        ]
    validation = tuple([each[:BATCH] for each in data] for data in (x, y))
    common = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0, "validation_data": validation}
    history = model.fit(x, y, **common, callbacks=callbacks)
    if folder is not None and model.distribute_strategy.is_chief:
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        found = {"epochs": history.epoch, "rate": rate, **history.history}
        (folder / "history.json").write_text(json.dumps(found))
    return history


def train(config):
    import keras
    import numpy as np
    import ray

    import keras_het
    import keras_het.ray
    from keras_het.fit import backup_folder
    from keras_het.launch.local.worker_environment import Emulation

    folder = Path(config["folder"])
    once = folder / "died"
    keras.utils.set_random_seed(0)

    def die_in(phase, index):
        dies = config.get("dies")
        if (dies == phase and index == 1 and not once.exists()) or (dies, phase) == ALWAYS:
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    die_in("start", index)
    step_seconds = config.get("step_seconds", 0.05)
    os.environ.update(Emulation((1.0,), 0.0, fixed_seconds=step_seconds).environment_of(0))
    where = folder / SHARED
    if config.get("shares_nothing"):  # as if each node of Ray were a machine
        node = ray.get_runtime_context().get_node_id()
        where = folder / f"disk-{node}"
        (memory := folder / f"memory-{node}").mkdir(exist_ok=True)
        backup_folder._SHARED_MEMORY = memory
        socket.gethostname = lambda: node
    strategy = keras_het.HeterogeneousStrategy()
    with strategy.scope():
        model, x, y = model_and_data()

    class Watched(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            die_in("begin of fit", index)

        def on_train_batch_begin(self, batch, logs=None):
            die_in("first step", index)

        def on_train_batch_end(self, batch, logs=None):
            step = int(self.model.optimizer.iterations.numpy())
            with (folder / f"steps-{index}").open("a") as file:
                file.write(
                    json.dumps([os.getpid(), strategy.num_workers, step, time.time()]) + "\n"
                )
            die_in(f"step {step}", index)
            if step == config.get("fails") and index == 1:
                raise KeyError("a mistake of the script")
            if step == NUM_STEPS - 1:
                wait_until(lambda: (folder / "may_end").exists())
            if step == NUM_STEPS:
                die_in("last step", index)
            wait_for(lambda: not (folder / "slow").exists(), 1.0)

        def on_test_batch_end(self, batch, logs=None):
            die_in("validation", index)

        def on_epoch_end(self, epoch, logs=None):
            die_in("end of an epoch", index)

    elastic = keras_het.callbacks.ElasticBackup(str(where), save_freq=config.get("save_freq", 3))
    if config.get("dies") == "save" and strategy.is_chief:
        complete = backup_folder.BackupFolder._complete

        def dying(self, aside, name):
            if name.startswith("backup-3-"):
                die_in("save", 1)
            complete(self, aside, name)

        backup_folder.BackupFolder._complete = dying
    callbacks = [elastic, keras_het.ray.ReportCallback(), Watched()]
    fit(model, x, y, callbacks, folder if config.get("remembers") else None)
    die_in("after fit", index)
    if strategy.is_chief:
        aside = folder / "weights.npz.tmp"
        with aside.open("wb") as file:
            np.savez(file, *model.get_weights())
        aside.rename(folder / "weights.npz")


def wait_until(condition, what=""):
    if not wait_for(condition, LONGEST_SECONDS):
        raise TimeoutError(f"waited {LONGEST_SECONDS} s for {what or condition}")


def wait_for(condition, seconds):
    """Wait for a condition, and return whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true


class Disturbance:
    """What is done to a cluster while it trains."""

    def __init__(self, cluster, nodes, other, folder, running):
        self.cluster, self.nodes, self.other = cluster, nodes, other
        self.folder, self.running = folder, running
        self.ended: set[int] = set()

    def groups(self):
        pids = (self.folder / "steps-0").read_text().splitlines()
        return {json.loads(line)[0] for line in pids}

    def wait_for_steps(self):
        """Wait until a group has trained some steps of its own."""
        path = self.folder / "steps-0"

        def has_trained():
            lines = path.read_text().splitlines() if path.exists() else []
            rows = [json.loads(line) for line in lines if line.endswith("]")]
            recent = rows[-STEPS_BETWEEN_EVENTS:]
            is_new = len(recent) == STEPS_BETWEEN_EVENTS and len({row[0] for row in recent}) == 1
            return is_new and recent[0][0] not in self.ended

        wait_until(lambda: has_trained() or not self.running.is_alive(), "steps of a new group")
        (self.folder / "slow").unlink(missing_ok=True)

    def run(self, event):
        self.wait_for_steps()
        print("event", event, time.time(), flush=True)
        self.ended = self.groups()
        kind, _, argument = event.partition(" ")
        if kind in ("add", "drain"):
            (self.folder / "slow").touch()  # Ray takes up to 20 seconds to see it
        getattr(self, kind)(*argument.split())

    def kill(self, *workers):
        rows = [(self.folder / f"steps-{each}").read_text().splitlines()[-1] for each in workers]
        for row in rows:
            os.kill(json.loads(row)[0], signal.SIGKILL)

    def lose(self, node="-1"):
        self.cluster.remove_node(self.nodes.pop(int(node)), allow_graceful=False)

    def terminate(self):
        process = self.nodes.pop().all_processes["raylet"][0].process
        process.send_signal(signal.SIGTERM)

    def drain(self):
        from ray._private import worker
        from ray.core.generated import autoscaler_pb2

        worker.global_worker.gcs_client.drain_node(
            self.nodes.pop().node_id,
            autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
            "a test",
            int((time.time() + LONGEST_SECONDS) * 1000),
        )

    def add(self):
        self.nodes.append(add_node(self.cluster))

    def lose_store(self):
        """Lose what the head node knows; a driver of Ray ends its process then."""
        self.cluster.head_node.kill_gcs_server(check_alive=False)
        self.running.join(LONGEST_SECONDS)

    def link(self, state):
        """Have the other host's cable pulled out, or put in and its node started again."""
        (request := self.folder / f"link-{state}").touch()
        wait_until(lambda: not request.exists())
        if state == "up":
            assert self.other is not None
            self.other.wait()  # it learns that it is believed dead
            (self.folder / "slow").touch()
            self.other.start()

    def lose_and_add(self):
        """Lose a node that is needed, and give another one when training has stopped."""
        before = len((self.folder / "steps-0").read_text().splitlines())
        self.lose()
        seen = [before, time.monotonic()]

        def stands_still():
            now = len((self.folder / "steps-0").read_text().splitlines())
            if now != seen[0]:
                seen[:] = [now, time.monotonic()]
            return time.monotonic() - seen[1] > 8.0

        wait_until(stands_still)
        self.add()


STORE_BYTES = 80 * 2**20


def add_node(cluster):
    about = {"num_cpus": 4, "resources": {"het": 1}, "object_store_memory": STORE_BYTES}
    return cluster.add_node(**about, node_ip_address=cluster.head_node.node_ip_address)


class OtherHost:
    """A node on another host, started as a user does."""

    def __init__(self, cluster_address, own_address, *prefix):
        options = [f"--address={cluster_address}", f"--node-ip-address={own_address}"]
        options += ["--num-cpus=4", '--resources={"het": 1}', "--block"]
        options += [f"--object-store-memory={STORE_BYTES}"]
        self._command = [*prefix, str(Path(sys.executable).with_name("ray")), "start", *options]
        self.start()

    def start(self):
        self._process = subprocess.Popen(self._command)

    def wait(self):
        self._process.wait(LONGEST_SECONDS)

    def stop(self):
        self._process.terminate()
        self.wait()


@contextlib.contextmanager
def local_cluster(num_nodes, on_head, hosts):
    import ray
    from ray.cluster_utils import Cluster

    head: dict[str, Any] = {"num_cpus": 4, "resources": {"het": on_head} if on_head else {}}
    head |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    if hosts:
        head["node_ip_address"] = hosts[0]
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = None
    try:
        nodes = [add_node(cluster) for _ in range(num_nodes)]
        ray.init(address=cluster.address, logging_level="ERROR")
        if hosts:
            other = OtherHost(cluster.address, *hosts[1:])
        yield cluster, nodes, other
    finally:
        if other is not None:
            other.stop()
        ray.shutdown()
        cluster.shutdown()


def main(folder, config):
    from ray import cloudpickle
    from ray.train import RunConfig

    import keras_het.ray

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    result: list[BaseException | None] = []
    num_nodes, on_head = config["nodes"], config.get("on_head", 0)
    with local_cluster(num_nodes, on_head, config.get("hosts", [])) as (cluster, nodes, other):
        trainer = keras_het.ray.KerasTrainer(
            train,
            (config.get("least", 1), num_nodes + on_head + 1),
            resources_per_worker={"het": 1},
            resize_interval_seconds=3,
            train_loop_config={**config, "folder": str(folder)},
            run_config=RunConfig(storage_path=str(folder / "results")),
        )

        def fit():
            try:
                found = trainer.fit()
            except BaseException as error:
                result.append(error)
            else:
                result.append(None)
                (folder / "reported").write_text(json.dumps(found.metrics))
                with found.checkpoint.as_directory() as saved:
                    shutil.copy(Path(saved) / "model.keras", folder)

        running = threading.Thread(target=fit, daemon=True)
        running.start()
        disturbance = Disturbance(cluster, nodes, other, folder, running)
        for event in config.get("events", ()):
            disturbance.run(event)
        if config.get("events"):
            disturbance.wait_for_steps()
        (folder / "may_end").touch()
        running.join(LONGEST_SECONDS)
    if not result:
        print("it has not ended", flush=True)
        return 2
    if result[0] is not None:
        print(f"{type(result[0]).__name__}: {result[0]}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
