"""The command line's grammar."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_het import __version__
from keras_het.launch.doctor_command import add_doctor_command
from keras_het.launch.grammar import add_command, not_negative, number
from keras_het.launch.report_command import add_report_command
from keras_het.launch.serve_command import add_serve
from keras_het.launch.validate_command import add_validate_command

_EPILOG = """\
examples:
  keras-het run --workers 3 train.py --epochs 5
  keras-het run --speeds 4,2,1 train.py         three emulated devices, 4 : 2 : 1
  keras-het run --workers 2 -m package.train
  keras-het run --speeds 4,4,1 --async-workers 1 train.py    the slow one trains on its own

Options of keras-het stand before the script; everything after it belongs to the script.

Security: workers meet on 127.0.0.1, but TensorFlow's servers listen on every interface of this
machine, and cannot be bound to one. Who reaches their ports reads files and environment, and
writes: let a firewall keep others out, or start the command in a network of its own:
unshare --map-root-user --net sh -c 'ip link set lo up; keras-het run ...'
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-het",
        description="Train Keras 3 models over workers of different speed.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"keras-het {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = add_command(
        commands,
        "run",
        "start a script as several workers on this machine",
        "Starts a script as several workers on this machine, with TF_CONFIG on "
        "127.0.0.1 and free ports. Ends all when one fails and says which and why.",
        _EPILOG,
    )
    _add_target(run)
    _add_emulation(run)
    _add_processors(run)
    _add_output(run)
    add_doctor_command(commands)
    add_validate_command(commands)
    add_serve(commands)
    add_report_command(commands)
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command != "run":
        return options
    if options.speeds is None and not (
        options.sample_milliseconds is None and options.fixed_milliseconds is None
    ):
        parser.error("--sample-milliseconds and --fixed-milliseconds need --speeds")
    if options.speeds and options.workers not in (None, len(options.speeds)):
        parser.error(
            f"--speeds has {len(options.speeds)} speeds, but --workers is {options.workers}: give "
            "as many speeds as workers, or leave out --workers"
        )
    if options.workers is None and options.speeds is None:
        parser.error("give --workers N, or --speeds A,B,... to emulate devices")
    num_workers = options.workers or len(options.speeds)
    if options.async_workers >= num_workers:
        parser.error(
            f"--async-workers {options.async_workers} leaves no worker of {num_workers} for the "
            "synchronous group; give less"
        )
    if options.module == []:
        parser.error("-m needs a MODULE")
    # Path.is_file raises an error for names that are too long
    if options.module is None and not os.path.isfile(_script(parser, options)):  # noqa: PTH113
        parser.error(f"there is no file {options.script!r}; give a script, or -m MODULE")
    return options


def worker_command(options: argparse.Namespace) -> list[str]:
    if options.module is not None:
        return [options.python, "-m", *options.module]
    return [options.python, options.script, *options.script_arguments]


def _script(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    if options.script == "--" and options.script_arguments:
        options.script, *options.script_arguments = options.script_arguments
    if not options.script:
        parser.error("give the script that each worker runs, or -m MODULE")
    return str(options.script)


def _add_target(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "-w",
        "--workers",
        type=_positive_integer,
        metavar="N",
        help="number of workers (default: the number of speeds)",
    )
    run.add_argument(
        "--async-workers",
        type=_positive_integer,
        metavar="N",
        default=0,
        help="how many of the workers, the last ones, train outside of the synchronous group and "
        "exchange with its leader (see keras_het.callbacks.HybridAggregation)",
    )
    run.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        help="MODULE [ARGUMENTS]: run a module, as python -m does, instead of a script; all that "
        "follows belongs to it",
    )
    run.add_argument(
        "--python",
        default=sys.executable,
        metavar="PROGRAM",
        help="Python interpreter of the workers (default: this one)",
    )
    run.add_argument("script", nargs="?", metavar="SCRIPT", help="script that each worker runs")
    run.add_argument(
        "script_arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )


def _add_emulation(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("emulation of devices of different speed")
    group.add_argument(
        "--speeds",
        type=_speeds,
        metavar="A,B,...",
        help="relative speed of each worker's device in samples per second, such as 4,2,1",
    )
    group.add_argument(
        "--sample-milliseconds",
        type=not_negative,
        metavar="MS",
        help="time of one sample on a device of speed 1 (default: 4)",
    )
    group.add_argument(
        "--fixed-milliseconds",
        type=not_negative,
        metavar="MS",
        help="time of a step without samples, on every device (default: 0)",
    )


def _add_processors(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("processors")
    group.add_argument(
        "--cpus-per-worker",
        type=_positive_integer,
        metavar="N",
        help="CPUs of each worker (default: all CPUs dealt out evenly)",
    )
    group.add_argument(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="bind each worker to its CPUs (default: yes if no CPU has to be shared)",
    )


def _add_output(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--keep-env",
        action="append",
        default=[],
        metavar="NAME",
        help="pass a variable that looks like a secret (TOKEN, SECRET, PASSWORD, "
        "API_KEY and the like in its name) to the workers all the same; may be a pattern such as "
        "'AWS_*', and may come several times",
    )
    group = run.add_argument_group("output and end")
    group.add_argument(
        "--only-chief",
        "--quiet-workers",
        action="store_true",
        help="show the output of worker 0 only; a failed worker's last lines are shown anyway",
    )
    group.add_argument(
        "--tf-logs",
        action="store_true",
        help="show also what TensorFlow logs of its start (its warnings are shown anyway)",
    )
    group.add_argument(
        "--log-dir", type=Path, metavar="DIRECTORY", help="write worker-N.log for each worker"
    )
    group.add_argument(
        "--grace-seconds",
        type=not_negative,
        default=10.0,
        metavar="S",
        help="time to obey a signal before a stronger one follows (default: 10)",
    )


def _positive_integer(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, received {text!r}"
        )
    return number


def _speeds(text: str) -> tuple[float, ...]:
    speeds = tuple(number(part) for part in text.split(","))
    if not all(0 < speed < float("inf") for speed in speeds):
        raise argparse.ArgumentTypeError(
            f"expected positive numbers with commas, such as 4,2,1; received {text!r}"
        )
    return speeds
