"""A real Slurm on two hosts in network namespaces: `srun keras-het worker`."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from _namespaces import limited_hosts, why_not

PROGRAMS = ("munged", "nsenter", "sbatch", "scancel", "sinfo", "slurmctld", "slurmd", "srun")
SEARCH = f"{os.environ['PATH']}:/usr/sbin"
NODES = ("n1", "n2")
DEPLOY = Path(__file__).parents[2] / "recipes" / "deploy"
PATIENCE = 240.0  # on a busy machine, importing TensorFlow included
CONFIG = """\
ClusterName=test
SlurmctldHost={name}({controller})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1
KillWait=60
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES
"""
NODE = "NodeName={node} NodeHostname={name} NodeAddr={address} CPUs=2"
# Null devices instead of GPUs: the driver is not asked, and TensorFlow has no GPU to use.
GPUS = "NodeName=n2 Name=gpu File={folder}/gpu[0-1]\n"

pytestmark = [pytest.mark.full, pytest.mark.network_namespaces]


class Slurm:
    """A controller and two nodes, each on a host of its own."""

    def __init__(self, hosts, folder, stack):
        self._hosts, self._folder = hosts, folder
        self._environment = {**os.environ, "PATH": SEARCH, "SLURM_CONF": str(folder / "slurm.conf")}
        addresses = {"controller": hosts.address(0)}
        addresses |= {node: hosts.address(index) for index, node in enumerate(NODES, 1)}
        values = {"name": socket.gethostname(), "folder": folder, **addresses}
        names = {"localhost": "127.0.0.1", socket.gethostname(): hosts.address(0), **addresses}
        lines = [f"{address} {name}\n" for name, address in names.items()]
        (folder / "hosts").write_text("".join(lines))
        text = CONFIG.format(**values)
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
            text += NODE.format(node=node, address=addresses[node], **values)
            text += " Gres=gpu:2\n" if node == "n2" else "\n"
        for number in range(2):
            os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (folder / "gres.conf").write_text(GPUS.format(folder=folder))
        (folder / "slurm.conf").write_text(text)
        for name in ("state", "munge"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        munge = [f"--{name}={folder}/munge/{name}" for name in ("socket", "pid-file", "seed-file")]
        munge += [f"--key-file={key}", f"--log-file={folder}/munge/log"]
        self._start(stack, 0, "munged", "--foreground", "--force", *munge)
        self.wait_until((folder / "munge/socket").exists, "munge")
        self._start(stack, 0, "slurmctld", "-D")
        for index, node in enumerate(NODES, 1):
            self._start(stack, index, "slurmd", "-D", "-N", node)
        self.wait_until(lambda: self.call("sinfo", "-h", "-o%D%t") == "2idle\n", "idle nodes")

    def srun(self, *arguments, **environment):
        """Start a step on the nodes; its output is one stream."""
        return subprocess.Popen(
            self._command(0, "srun", *arguments),
            env={**self._environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, *command):
        command = tuple(self._command(0, *command))
        called = subprocess.run(command, env=self._environment, capture_output=True, text=True)
        return called.stdout

    def wait_until(self, is_true, what, seconds=60):
        end = time.monotonic() + seconds
        while not is_true():
            if time.monotonic() > end:
                logs = "\n".join(log.read_text() for log in self._folder.glob("*.log"))
                pytest.fail(f"no {what}:\n{logs}")
            time.sleep(0.2)

    def _command(self, host, *command):
        """A command on a host that knows the others by name; its mounts are its own."""
        mount = f'mount --bind {self._folder}/hosts /etc/hosts && exec "$@"'
        enter = ["nsenter", f"--net=/run/netns/{self._hosts.names[host]}", "unshare", "--mount"]
        return [*enter, "sh", "-c", mount, "sh", *command]

    def _start(self, stack, host, *command):
        with (self._folder / f"{command[0]}-{host}.log").open("w") as log:
            process = subprocess.Popen(
                self._command(host, *command), env=self._environment, stdout=log, stderr=log
            )

        def end():
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)

        stack.callback(end)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if missing:
        pytest.skip(
            f"needs Slurm and munge, of which there are no {missing} (Debian: slurmctld, "
            "slurmd, slurm-client, munge)"
        )
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        hosts = stack.enter_context(limited_hosts([1000.0] * 3))
        made = Slurm(hosts, tmp_path_factory.mktemp("slurm"), stack)
        yield made
        made.call("scancel", "--user=root", "--signal=KILL")
        made.wait_until(lambda: made.call("squeue", "-h") == "", "end of all jobs")


def worker(*arguments):
    return [sys.executable, "-m", "keras_het", "worker", *arguments]


@pytest.mark.parametrize(
    "options",
    [
        ["-N2", "-n3"],
        ["-N2", "-n4", "-m", "cyclic"],
        ["-N1", "-n1", "-w", "n2", ":", "-N1", "-n2", "-w", "n1"],
    ],
    ids=["blocks", "in circles", "heterogeneous"],
)
def test_each_worker_is_where_the_others_look_for_it(slurm, tmp_path, options):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os\n"
        "config = json.loads(os.environ['TF_CONFIG'])\n"
        "address = config['cluster']['worker'][config['task']['index']]\n"
        "print('task', config['task']['index'], address, os.environ['SLURMD_NODENAME'])\n"
    )
    split = options.index(":") if ":" in options else len(options)
    parts = [options[:split], options[split + 1 :]] if split < len(options) else [options]
    command = worker("--port", "7000", str(script))
    line = [each for part in parts[:-1] for each in (*part, *command, ":")]
    step = slurm.srun(*line, *parts[-1], *command)
    output, _ = step.communicate(timeout=PATIENCE)
    assert step.returncode == 0, output
    tasks = sorted(re.findall(r"task (\d) (n\d):(\d+) (n\d)", output))
    assert [int(task) for task, *_ in tasks] == list(range(len(tasks))) and len(tasks) >= 3
    assert all(host == node for _, host, _, node in tasks)
    assert len({(host, port) for _, host, port, _ in tasks}) == len(tasks)


TRAIN = """
import sys
import keras, numpy as np, keras_het
strategy = keras_het.HeterogeneousStrategy()
x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
with strategy.scope():
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(keras.optimizers.SGD(0.1), "mse")
class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.params["epochs"] > 2:
            print("step", self.model.optimizer.iterations.numpy(), flush=True)
callbacks = [keras_het.callbacks.BackupAndRestore(path) for path in sys.argv[1:]]
epochs = 10**6 if callbacks else 2
y = x.sum(axis=1, keepdims=True) + 1
model.fit(x, y, 12, epochs, verbose=0, shuffle=False, callbacks=[*callbacks, Tell()])
print("trained", strategy.num_workers, *model.get_weights()[0].ravel(), flush=True)
"""


def on_one_device():
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    y = x.sum(axis=1) + 1
    weights, bias = np.ones(4), 0.0
    for _ in range(2):
        for rows in (slice(0, 12), slice(12, 24)):
            error = x[rows] @ weights + bias - y[rows]
            weights, bias = weights - 0.2 * x[rows].T @ error / 12, bias - 0.2 * error.mean()
    return [float(each) for each in weights]


def test_workers_train_as_one_device(slurm, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    step = slurm.srun("-N2", *worker(str(script)))
    output, _ = step.communicate(timeout=PATIENCE)
    assert step.returncode == 0, output
    results = re.findall(r"trained 2 (.*)", output)
    assert len(results) == 2 and len(set(results)) == 1
    trained = [float(each) for each in results[0].split()]
    np.testing.assert_allclose(trained, on_one_device(), rtol=1e-5)


def test_a_signal_from_slurm_saves_a_backup(slurm, tmp_path):
    script, backup = tmp_path / "train.py", tmp_path / "backup"
    script.write_text(TRAIN)
    command = worker("--gpus", "auto", str(script), str(backup))
    step = slurm.srun("-N1", "-n2", "-w", "n2", "--gpus-per-node=2", *command)
    assert step.stdout is not None
    lines: list[str] = []
    while not re.search(r"step \d\d", lines[-1] if lines else ""):
        lines.append(step.stdout.readline())
        assert lines[-1], "".join(lines)
    job = slurm.call("squeue", "-h", "-o%i").strip()
    slurm.call("scancel", "--signal=TERM", job)
    output, _ = step.communicate(timeout=PATIENCE)
    assert step.returncode == 143, "".join(lines) + output
    assert "again: ends at once" not in output
    assert backup.exists()


def submit(slurm, folder, text, script):
    """Submit a batch script of recipes/deploy, and return its job and its output."""
    (folder / "job.sbatch").write_text(text)
    (folder / "train.py").write_text(script)
    program = folder / "bin" / "keras-het"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m keras_het "$@"\n')
    program.chmod(0o755)
    path = f"--export=ALL,PATH={program.parent}:{SEARCH}"
    where = [f"--chdir={folder}", f"--output={folder}/out", "--parsable"]
    told = slurm.call("sbatch", path, *where, str(folder / "job.sbatch")).strip()
    return told, folder / "out"


HYBRID = """
import json, os
import keras, numpy as np, keras_het
keras.utils.set_random_seed(0)
strategy = keras_het.HeterogeneousStrategy()
x = np.random.default_rng(0).normal(size=(240, 4)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
hybrid = keras_het.callbacks.AsyncWorkers()
model.fit(x, x.sum(axis=1, keepdims=True), 12, 3, verbose=0, callbacks=[hybrid])
task = json.loads(os.environ["TF_CONFIG"])["task"]
weights = model.get_weights()[0].ravel().tolist()
gpu, node = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["SLURMD_NODENAME"]
with open(f"{task['type']}-{task['index']}.json", "w") as file:
    json.dump({"node": node, "gpu": gpu, "size": strategy.num_workers, "weights": weights}, file)
"""


def test_nodes_without_gpus_train_outside_of_the_group(slurm, tmp_path):
    """The script of recipes/deploy for unequal nodes, with fewer of them and of their GPUs."""
    text = (DEPLOY / "unequal.sbatch").read_text().replace("--nodes=3", "--nodes=1")
    text = text.replace("--nodes=2 --ntasks-per-node=4", "--nodes=1 --ntasks-per-node=2")
    job, out = submit(
        slurm, tmp_path, text.replace("--async-workers 3", "--async-workers 1"), HYBRID
    )

    def has_ended():
        told = slurm.call("scontrol", "show", "job", job)
        return bool(re.search("JobState=(COMPLETED|FAILED|CANCELLED)", told))

    slurm.wait_until(has_ended, "end of the job", PATIENCE)
    found = {each.stem: json.loads(each.read_text()) for each in tmp_path.glob("*.json")}
    assert sorted(found) == ["async-0", "worker-0", "worker-1"], out.read_text()
    assert found["async-0"]["node"] == "n1"
    group = [found[f"worker-{number}"] for number in range(2)]
    assert [(each["node"], each["gpu"], each["size"]) for each in group] == [
        ("n2", "0", 2), ("n2", "1", 2)
    ]  # fmt: skip
    assert len({str(each["weights"]) for each in found.values()}) == 1


def without_gpus(name):
    """Return a batch script of recipes/deploy for nodes of two CPUs."""
    text = re.sub(r"--gpus(-per-node=\S+| auto)", "", (DEPLOY / name).read_text())
    return re.sub(r"(--cpus-per-task|SRUN_CPUS_PER_TASK)=8", r"\1=1", text)


def test_nodes_with_different_gpus_are_one_group(slurm, tmp_path):
    text = re.sub(
        r"--nodes=\d --ntasks-per-node=\d",
        "--nodes=1 --ntasks-per-node=2",
        without_gpus("generations.sbatch"),
    )
    script = "import os\nprint('task', os.environ['TF_CONFIG'], flush=True)\n"
    _, out = submit(slurm, tmp_path, text, script)
    slurm.wait_until(lambda: out.exists() and out.read_text().count("task") >= 4, "workers")
    lines = [line for line in out.read_text().splitlines() if line.startswith("task ")]
    found = [json.loads(line.removeprefix("task ")) for line in lines]
    assert {each["task"]["index"] for each in found} == {0, 1, 2, 3}
    (workers,) = {tuple(each["cluster"]["worker"]) for each in found}
    assert len(set(workers)) == 4


def test_the_batch_script_waits_for_its_next_turn_after_the_signal(slurm, tmp_path):
    """That of recipes/deploy, without GPUs and with a script that saves nothing."""
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    text = without_gpus("train.sbatch").replace("--nodes=4", "--nodes=2")
    job, out = submit(slurm, tmp_path, text, script)
    slurm.wait_until(lambda: out.exists() and out.read_text().count("ready") == 4, "workers")
    slurm.call("scancel", "--signal=TERM", job)

    def is_queued_again():
        told = slurm.call("scontrol", "show", "job", job)
        return "Restarts=1" in told and "JobState=PENDING" in told

    slurm.wait_until(is_queued_again, "job that is queued again")
    slurm.call("scancel", job)
