"""The commands `parameter-server` and `summation-server`, which need no script and no data."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from keras_het.launch.grammar import Commands, Option, add_command, add_options
from keras_het.seen_versions import KERAS_BACKEND, NEEDED_BACKEND, check_keras_backend

if TYPE_CHECKING:
    from keras_het.strategy.cluster.cluster_config import ClusterConfig

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # numbers from glibc's malloc.h
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
_VARIABLES = ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def share_freed_memory() -> bool:
    """Let all threads allocate from one arena, which keeps freed memory."""
    # By default glibc has memory for each of many threads, so that successive messages allocate
    # again and again, and returns it to the system, which fills it with zeros for the next one.
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _VARIABLES):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    options = {
        _ARENA_MAX: 1,
        _MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD,
        _TRIM_THRESHOLD: 2**30,
    }
    return all([set_option(option, value) == 1 for option, value in options.items()])


_OPTIONS = (
    Option("--once", "end after one training"),
    Option(
        "--import MODULE",
        "import a module, as with python -m, that registers a rule of your own",
        more={"dest": "module"},
    ),
)


def add_serve_commands(commands: Commands) -> None:
    serve = add_command(
        commands,
        "parameter-server",
        serve_parameters,
        "hold a part of the parameter service (job ps in TF_CONFIG)",
        "Holds a part of the center weights of a hybrid training, on a machine that "
        "needs neither script nor data. The leader of the sync group says what to hold. Reads "
        "TF_CONFIG and the secret KERAS_HET_SECRET or KERAS_HET_SECRET_FILE. Ends "
        "with Ctrl-C or SIGTERM.",
    )
    add_options(serve, _OPTIONS)
    add_command(
        commands,
        "summation-server",
        sum_gradients,
        "sum gradients on a spare machine (job summation in TF_CONFIG)",
        "Sums gradients on the CPUs of a machine that trains nothing. Reads TF_CONFIG and the "
        "secret KERAS_HET_SECRET or KERAS_HET_SECRET_FILE. Ends with Ctrl-C or SIGTERM.",
    )


def sum_gradients(_: argparse.Namespace) -> int:
    from keras_het.summation.machine import serve_until_stopped

    serve_until_stopped()
    return 0


def serve_parameters(options: argparse.Namespace) -> int:
    share_freed_memory()  # before there are threads
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # the center is in host memory
    os.environ[KERAS_BACKEND] = os.environ.get(KERAS_BACKEND) or NEEDED_BACKEND  # as for workers
    check_keras_backend(os.environ[KERAS_BACKEND])
    logging.basicConfig(level=logging.WARNING)
    if options.module:
        sys.path.insert(0, str(Path.cwd()))
        try:
            importlib.import_module(options.module)
        except ModuleNotFoundError as error:
            raise ValueError(
                "--import needs a module that python -m would find here. Received: "
                f"{options.module!r} ({error}). Leave out .py, or set PYTHONPATH."
            ) from error
    from keras_het.exchange.secret import read_secret
    from keras_het.strategy.cluster.cluster_config import read_cluster_config

    config = read_cluster_config()
    if config is None or not config.is_serving_only:
        raise ValueError(_wrong_task(config))
    address = config.service_addresses()[config.task_index]
    secret = read_secret()
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    from keras_het.asynchronous.parameter_service.hosting import ServingProcess

    process = ServingProcess(address, secret, stopped.is_set, _say)
    while process.serve_one():
        if options.once and not process.is_offered_another:
            break
    process.close()
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"keras-het parameter-server: {text}\n")
    sys.stdout.flush()


def _wrong_task(config: ClusterConfig | None) -> str:
    if config is None:
        received = "no TF_CONFIG"
    elif config.is_parameter_server:
        received = f"{config.task_name} of async workers alone, which runs their script"
    else:
        received = config.task_name
    return (
        f"This process is not a parameter server. Received: {received}. List this "
        'machine as job "ps" in "cluster" of TF_CONFIG, beside "worker" and "async", and give it '
        '"task": {"type": "ps", "index": 0}.'
    )
