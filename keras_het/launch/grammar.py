"""What commands' grammars have in common: how a parser begins, scripts and numbers as arguments."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from keras_het.launch.cluster_environment import PORT

_WIDTH = 96
T = TypeVar("T")

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


class Option(NamedTuple):
    """An option; the last of its names in capitals stands for its value, and a flag has none."""

    names: str
    help: str
    type: Callable[[str], Any] = str
    default: object = None
    more: Mapping[str, Any] = MappingProxyType({})


def add_options(group: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    for each in options:
        *names, last = each.names.split()
        given: dict[str, Any] = {"help": each.help, "default": each.default}
        if not last.startswith("-"):
            given |= {"metavar": last, "type": each.type}
        elif not each.more:
            given |= {"action": "store_true", "default": False}
        given |= each.more
        group.add_argument(*names, *([last] if last.startswith("-") else []), **given)


def argument(
    expected: str, convert: Callable[[str], T], holds: Callable[[T], bool] = lambda value: True
) -> Callable[[str], T]:
    """Return a type of argument: what a text is converted to, and what must hold of that."""

    def parse(text: str) -> T:
        with contextlib.suppress(ValueError):
            value = convert(text)
            if holds(value):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, received {text!r}")

    return parse


not_negative = argument("a number of at least 0", float, lambda value: 0 <= value < math.inf)
positive_integer = argument("a whole number of at least 1", int, lambda value: value >= 1)
speeds_of = argument(
    "positive numbers with commas, such as 4,2,1",
    lambda text: tuple(float(part) for part in text.split(",")),
    lambda speeds: all(0 < speed < math.inf for speed in speeds),
)


GRACE_OPTION = Option(
    "--grace-seconds S",
    "time that workers of this host have to obey a signal before a stronger one follows, for "
    "instance to save a backup (default: 10)",
    not_negative,
    10.0,
)
CLUSTER_OPTIONS = (
    Option(
        "--port N",
        "port of the first worker of each host; the next ones take every second port after it "
        f"(default: {PORT}); two jobs on one host need different ones; keras-het run "
        "ignores it where all workers are on this machine",
        positive_integer,
        PORT,
    ),
    Option(
        "--async-workers N",
        "how many of the workers, the last ones, train outside of the synchronous group and "
        "exchange with its leader (see keras_het.callbacks.AsyncWorkers); those of keras-het "
        "worker all need the same KERAS_HET_SECRET",
        positive_integer,
        0,
    ),
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
    python = "Python interpreter of the workers (default: this one)"
    add_options(parser, [Option("--python PROGRAM", python, default=sys.executable)])
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
