"""What commands' grammars have in common: how a parser begins, and numbers as arguments."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import TypeAlias

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
