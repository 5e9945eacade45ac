"""The command `keras-het`."""

import argparse
import sys
from collections.abc import Sequence

from keras_het import __version__
from keras_het.launch.advise_command import add_advise_command
from keras_het.launch.benchmark_command import add_benchmark_command
from keras_het.launch.doctor_command import add_doctor_command
from keras_het.launch.local.display import Display
from keras_het.launch.report_command import add_report_command
from keras_het.launch.run_command import add_run_command
from keras_het.launch.serve_command import add_serve_commands
from keras_het.launch.validate_command import add_validate_command
from keras_het.launch.worker_command import add_worker_command

_WRONG_USAGE = 2


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-het",
        description="Train Keras 3 models over workers of different speed.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"keras-het {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_run_command(commands)
    add_worker_command(commands)
    add_doctor_command(commands)
    add_advise_command(commands)
    add_benchmark_command(commands)
    add_validate_command(commands)
    add_serve_commands(commands)
    add_report_command(commands)
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check a command line; exit with code 2 if it is wrong."""
    options = make_parser().parse_args(arguments)
    if "check" in options:
        options.check(options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        return int(options.execute(options))
    except (ValueError, OSError) as error:
        Display(sys.stdout, sys.stderr).say(f"error: {error}")
        return _WRONG_USAGE


if __name__ == "__main__":
    sys.exit(main())
