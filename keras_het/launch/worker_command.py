"""The command `keras-het worker`: a scheduler calls it for each worker, or once on each host."""

from __future__ import annotations

import argparse
import functools
import os
import socket
import sys

from keras_het.launch.cluster_environment import SLURM, place_of, read_hosts
from keras_het.launch.grammar import (
    CLUSTER_OPTIONS,
    GRACE_OPTION,
    Commands,
    Option,
    add_command,
    add_options,
    add_script,
    check_script,
    script_command,
)
from keras_het.launch.local.display import Display
from keras_het.launch.local.worker_environment import (
    choose_gpus,
    environment_of,
    present_gpus,
    tf_config_of,
    with_backend,
)
from keras_het.strategy.cluster.cluster_config import TF_CONFIG, read_cluster_config
from keras_het.telemetry.hardware import NvmlMissingError

_EPILOG = """\
examples:
  srun --ntasks-per-node 4 keras-het worker --gpus auto train.py    a task for each GPU
  keras-het worker --hosts 'train-fast-0-[0-3].train,train-slow-0-0.train' train.py  (a JobSet)
  mpirun --hostfile hosts.txt keras-het worker --hosts hosts.txt train.py

TF_CONFIG is taken from the environment, or made from the variables of Slurm, of Kubeflow Trainer,
or from --hosts; then this process becomes the script, which receives all signals. Options of
keras-het stand before the script; everything after it belongs to the script.
"""


def add_worker_command(commands: Commands) -> None:
    worker = add_command(
        commands,
        "worker",
        become_worker,
        "run a script as one worker of a cluster that a scheduler starts",
        "Finds out from a scheduler's variables which worker this process is, sets TF_CONFIG, and "
        "runs the script in its place.",
        _EPILOG,
    )
    gpus = (
        "as in keras-het run; under Slurm each task of a host takes one of them. Elsewhere one "
        "process on each host starts a worker for each; all hosts have as many, unless --hosts "
        "gives the numbers"
    )
    hosts = (
        "host of each worker: a file with 'host [slots=N]' in each line, or hosts with commas, "
        "such as a,b:2,node[01-03], where :2 stands for two workers"
    )
    own = (Option("--gpus WHICH", gpus), Option("--hosts HOSTS", hosts))
    add_options(worker, (*own, *CLUSTER_OPTIONS, GRACE_OPTION))
    add_script(worker)
    worker.set_defaults(check=functools.partial(check_script, worker))


def become_worker(options: argparse.Namespace) -> int:
    environment = {"PYTHONUNBUFFERED": "1", **with_backend(os.environ)}
    command = script_command(options)
    run = [sys.executable, "-m", "keras_het", "run", "--pass-env", "*", "--python", options.python]
    if read_cluster_config(environment) is not None:
        if options.hosts:
            raise ValueError(
                "--hosts and TF_CONFIG both list the workers. Received: --hosts "
                f"{options.hosts}, TF_CONFIG={environment[TF_CONFIG]}. Unset TF_CONFIG, or leave "
                "out --hosts."
            )
        is_one = options.gpus is None
    else:
        is_one = _set_tf_config(environment, options)
    if not is_one:
        grace = str(options.grace_seconds)
        command = [*run, "--gpus", options.gpus, "--grace-seconds", grace, *command[1:]]
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


def _set_tf_config(environment: dict[str, str], options: argparse.Namespace) -> bool:
    """Set it for this process, and return whether that is one worker, not all of a host."""
    listed = read_hosts(options.hosts) if options.hosts else ()
    place = place_of(environment, listed, socket.gethostname(), options.gpus is not None)
    gpus = _gpus(options)
    tasks = [at for at, host in enumerate(place.hosts) if host == place.hosts[place.index]]
    # Slurm signals all processes of a step: with a launcher workers would be signalled twice,
    # which ends them at once
    is_one = not gpus or place.source == SLURM
    if gpus and is_one:
        if len(gpus) != len(tasks):
            raise ValueError(
                "Under Slurm each task of a host takes one of its GPUs. Received: "
                f"{len(tasks)} task(s) on this host, and {len(gpus)} GPU(s). Start a task for each "
                "GPU (srun --ntasks-per-node), or choose others with --gpus; leave it out where "
                "each task sees its own GPU only (srun --gpus-per-task=1)."
            )
        environment |= environment_of(gpus[tasks.index(place.index)])
    elif gpus and len(set(place.hosts)) == len(place.hosts):
        place = place.with_workers(len(gpus))
    addresses = place.addresses(options.port)
    if options.async_workers >= len(addresses):
        raise ValueError(
            f"--async-workers {options.async_workers} leaves no worker of {len(addresses)} for "
            "the synchronous group; give fewer"
        )
    environment[TF_CONFIG] = tf_config_of(place.index, addresses, options.async_workers)
    if not is_one and len(set(place.hosts)) == 1:
        del environment[TF_CONFIG]  # they meet on this host, where keras-het run finds free ports
    Display(sys.stdout, sys.stderr).say(
        f"worker {place.index} of {len(addresses)} at {addresses[place.index]}, by {place.source}."
    )
    return is_one


def _gpus(options: argparse.Namespace) -> list[str]:
    try:
        return choose_gpus(options.gpus, present_gpus()) if options.gpus is not None else []
    except (ValueError, NvmlMissingError) as error:
        raise ValueError(f"--gpus: {error}") from error
