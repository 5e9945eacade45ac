"""The commands `keras-het loader-advice` and `keras-het loader-worker`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from keras_het.launch.grammar import Commands, add_command, positive

_LARGEST_PORT = 65535
_ADVICE = """\
Runs the script up to its first model.fit, takes the tf.data.Dataset that is given to it, and says
what could be changed in that pipeline and what it would gain. Nothing is trained.
"""
_WORKER = """\
Runs tf.data pipelines for a dispatcher on another machine until the dispatcher is gone or Ctrl-C.
Traffic is not encrypted and not authenticated, and the port is open on all interfaces: use it in
networks you trust.
"""


def add_loader_commands(commands: Commands) -> None:
    """Add the commands to those of `keras-het`."""
    summary = "say what a script's input pipeline could gain, and how"
    advice = add_command(commands, "loader-advice", summary, _ADVICE)
    advice.add_argument(
        "--seconds",
        type=positive,
        default=0.5,
        metavar="S",
        help="how long to run each part of the pipeline (default: 0.5)",
    )
    advice.add_argument(
        "--step-milliseconds",
        type=positive,
        default=None,
        metavar="MS",
        help="time of the device for a batch; a pipeline that is faster gains nothing",
    )
    advice.add_argument("script", metavar="SCRIPT", help="script that calls model.fit")
    advice.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...")
    advice.set_defaults(execute=_run_advice)
    summary = "prepare data for consumers on other machines (tf.data service)"
    worker = add_command(commands, "loader-worker", summary, _WORKER)
    worker.add_argument(
        "--dispatcher", required=True, metavar="HOST:PORT", help="address of the dispatcher"
    )
    worker.add_argument(
        "--host",
        default="127.0.0.1",
        help="name or address under which consumers reach this machine (default: 127.0.0.1)",
    )
    worker.add_argument(
        "--port", type=_port, default=0, metavar="N", help="port (default: a free one)"
    )
    worker.add_argument(
        "--patience",
        type=positive,
        default=10.0,
        metavar="S",
        help="end when the dispatcher has been gone so long (default: 10)",
    )
    worker.set_defaults(execute=_run_worker)


def _run_advice(options: argparse.Namespace) -> int:
    # TensorFlow takes seconds to import: report wrong usage first
    # Path.is_file raises an error for names that are too long
    if not os.path.isfile(options.script):  # noqa: PTH113
        raise ValueError(f"there is no file {options.script!r}; give the script that calls fit")
    from keras_het.loader.advice.script import advise_script

    step_seconds = (options.step_milliseconds or 0.0) / 1e3
    report = advise_script(
        Path(options.script), options.script_arguments, options.seconds, step_seconds
    )
    return 0 if report is not None else 1


def _run_worker(options: argparse.Namespace) -> int:
    from keras_het.loader.data_service.worker_process import run_worker

    run_worker(options.dispatcher, options.host, options.port, options.patience)
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _LARGEST_PORT:
        raise argparse.ArgumentTypeError(
            f"expected a port from 0 (a free one) to {_LARGEST_PORT}, received {text!r}"
        )
    return int(text)
