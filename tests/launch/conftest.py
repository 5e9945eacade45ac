"""Fixtures that start the command line or clusters of tiny scripts, and see that nothing stays."""

import os
import re
import sys
import textwrap
import time

import psutil
import pytest

from keras_het.launch.local.free_ports import ReservedPorts
from keras_het.launch.local.local_cluster import LocalCluster
from keras_het.launch.local.worker_environment import secret_names
from keras_het.launch.local.worker_process import WorkerProcess

TIMEOUT = 60.0

# Every script knows its index and can wait for ever without using the processor.
_PREAMBLE = """
import json, os, signal, subprocess, sys
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
"""


class Launcher:
    """The command line, running in a separate process."""

    def __init__(self, arguments, env):
        command = [sys.executable, "-m", "keras_het", *arguments]
        # what the launcher would say it does not pass on
        secrets = secret_names(os.environ, [])
        own = {name: value for name, value in os.environ.items() if name not in secrets}
        environment = {**own, **env, "PYTHONUNBUFFERED": "1"}
        self._process = WorkerProcess(0, command, environment, lambda *_: None, lambda index: None)
        self.process_id = self._process.process_id

    def wait_for_output(self, *texts):
        for text in texts:
            if not self._process.wait_for_output(text, TIMEOUT):
                stdout, stderr = self._process.text("stdout"), self._process.text("stderr")
                pytest.fail(f"no {text!r} in:\n{stdout}\n{stderr}")

    def printed_process_ids(self):
        """Process ids that the workers printed behind `ready`."""
        lines = re.findall(r"ready((?: \d+)+)", self._process.text("stdout"))
        return [int(number) for line in lines for number in line.split()]

    def send_signal(self, number):
        self._process.send_signal(number)

    def finish(self, timeout=TIMEOUT):
        if not self._process.join(timeout):
            stdout, stderr = self._process.text("stdout"), self._process.text("stderr")
            pytest.fail(f"the launcher did not end:\n{stdout}\n{stderr}")
        return self._process.result()

    def end(self):
        self._process.send_signal(9)
        self._process.join(TIMEOUT)


@pytest.fixture
def ports():
    """Three addresses of this machine at which nothing listens."""
    with ReservedPorts(3) as reserved:
        reserved.release()
        yield reserved.addresses


@pytest.fixture
def script(tmp_path):
    """Writes a worker's script and returns its path."""

    def write(source):
        path = tmp_path / "worker_script.py"
        path.write_text(_PREAMBLE + textwrap.dedent(source))
        return str(path)

    return write


@pytest.fixture
def train_script(script):
    """Path of a training that says the number of workers, a worker's GPUs and its weights."""
    return script(
        """
        import keras, numpy as np, keras_het
        strategy = keras_het.HeterogeneousStrategy()
        keras.utils.set_random_seed(0)
        x = np.random.normal(size=(24, 4)).astype("float32")
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, x.sum(axis=1, keepdims=True), batch_size=12, epochs=2, verbose=0)
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "-")
        print("trained", strategy.num_workers, gpus, model.get_weights()[0].tolist(), flush=True)
        """
    )


@pytest.fixture
def launch():
    """Starts the command line; ends it, whatever happens, at the end of the test."""
    started: list[Launcher] = []

    def start(*arguments, **env):
        started.append(Launcher(list(arguments), env))
        return started[-1]

    yield start
    for launcher in started:
        launcher.end()


@pytest.fixture
def cluster_of(script):
    """Makes a started LocalCluster from a script's source; closes it at the end of the test.

    Where the script prints "ready", all workers have done so.
    """
    clusters: list[LocalCluster] = []

    def start(source, num_workers=None, **options):
        cluster = LocalCluster([sys.executable, script(source)], num_workers, **options)
        clusters.append(cluster)
        cluster.start()
        for index in range(cluster.num_workers if '"ready"' in source else 0):
            cluster.wait_for_output(index, "ready", TIMEOUT)
        return cluster

    yield start
    for cluster in clusters:
        cluster.close()


@pytest.fixture
def assert_gone():
    def is_alive(process_id):
        try:
            # An orphan that nobody reaped yet (no init process in some containers) is gone too.
            return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def check(process_ids):
        deadline = time.monotonic() + 10
        while alive := [each for each in process_ids if is_alive(each)]:
            assert time.monotonic() < deadline, f"survivors: {alive}"
            time.sleep(0.02)

    return check
