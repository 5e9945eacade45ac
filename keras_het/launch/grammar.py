"""What commands' grammars have in common: how a parser begins, scripts and numbers as arguments."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Callable
from typing import TypeAlias

from keras_het.launch.cluster_environment import PORT

_WIDTH = 96

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The result of `argparse.ArgumentParser.add_subparsers`."""


def add_command(
    commands: Commands,
    name: str,
    execute: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    epilog: str = "",
) -> argparse.ArgumentParser:
    """Add a command; `execute` returns its exit code."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, _WIDTH),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(execute=execute)
    return parser


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def not_negative(text: str) -> float:
    if not 0 <= number(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, received {text!r}")
    return number(text)


def positive_integer(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, received {text!r}"
        )
    return number


def speeds_of(text: str) -> tuple[float, ...]:
    speeds = tuple(number(part) for part in text.split(","))
    if not all(0 < speed < float("inf") for speed in speeds):
        raise argparse.ArgumentTypeError(
            f"expected positive numbers with commas, such as 4,2,1; received {text!r}"
        )
    return speeds


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the ports of workers on several machines, and which of the workers are asynchronous."""
    parser.add_argument(
        "--port",
        type=positive_integer,
        metavar="N",
        default=PORT,
        help="port of the first worker of each host; the next ones take every second port after it "
        f"(default: {PORT}); of no use where all workers are on this machine",
    )
    parser.add_argument(
        "--async-workers",
        type=positive_integer,
        metavar="N",
        default=0,
        help="how many of the workers, the last ones, train outside of the synchronous group and "
        "exchange with its leader (see keras_het.callbacks.HybridAggregation); those of keras-het "
        "worker all need the same KERAS_HET_SERVICE_SECRET",
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the script that workers run; everything after it belongs to it."""
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        help="MODULE [ARGUMENTS]: run a module, as python -m does, instead of a script; all that "
        "follows belongs to it",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PROGRAM",
        help="Python interpreter of the workers (default: this one)",
    )
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="script that each worker runs")
    parser.add_argument(
        "script_arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )


def check_script(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with code 2 if there is no script."""
    if options.module == []:
        parser.error("-m needs a MODULE")
    if options.module is not None:
        return
    if options.script == "--" and options.script_arguments:
        options.script, *options.script_arguments = options.script_arguments
    if not options.script:
        parser.error("give the script that each worker runs, or -m MODULE")
    # Path.is_file raises an error for names that are too long
    if not os.path.isfile(options.script):  # noqa: PTH113
        parser.error(f"there is no file {options.script!r}; give a script, or -m MODULE")


def script_command(options: argparse.Namespace) -> list[str]:
    if options.module is not None:
        return [options.python, "-m", *options.module]
    return [options.python, options.script, *options.script_arguments]
