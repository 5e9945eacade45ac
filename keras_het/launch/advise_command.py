"""The command `keras-het advise`: what devices of different speed can gain, before any training."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from operator import truediv

from keras_het.launch.grammar import (
    Commands,
    Option,
    add_command,
    add_options,
    argument,
    positive_integer,
    speeds_of,
)
from keras_het.planning.balance.min_max import min_max_shares_linear
from keras_het.planning.roles.roles import ring_bytes
from keras_het.planning.shares import apportion

_EPILOG = """\
examples:
  keras-het advise 300,180
  keras-het advise 300,180 --batch 64 --parameters 25e6 --link 1Gbit
"""
_LEAST_GAIN = 1.1
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "bit": 1 / 8, "B": 1}


def _bytes_per_second(text: str) -> float:
    found = re.fullmatch(r"([\d.e+]+) ?([kMG])(bit|B)(?:/s)?", text)
    if found is None:
        raise ValueError
    return float(found[1]) * _UNITS[found[2]] * _UNITS[found[3]]


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def add_advise_command(commands: Commands) -> None:
    parser = add_command(
        commands,
        "advise",
        advise,
        "calculate what devices of different speed gain together",
        "Calculates the gain of balanced shares over the fastest device alone and over equal "
        "shares. Nothing is measured.",
        _EPILOG,
    )
    parser.add_argument(
        "speeds",
        metavar="SPEEDS",
        type=speeds_of,
        help="speed of each device alone, with commas: samples/s, or relative without --link",
    )
    parameters = argument("a number above 0, such as 25e6", float, _is_positive)
    link = argument("a rate such as 1Gbit or 125MB", _bytes_per_second, _is_positive)
    options = (
        Option("--batch N", "global batch: whole shares and times", positive_integer),
        Option("--parameters N", "parameters of the model, in float32", parameters),
        Option("--link RATE", "link of each device's machine, such as 1Gbit or 125MB", link),
    )
    add_options(parser, options)


def advise(options: argparse.Namespace) -> int:
    speeds, n = options.speeds, len(options.speeds)
    if n < 2:
        raise ValueError(
            f"Expected the speeds of at least two devices. Received: {speeds[0]:g}. Separate them "
            "with commas, as in 24,11."
        )
    if (options.parameters is None) != (options.link is None):
        raise ValueError(
            "--parameters and --link give the time of communication together. Received: one of "
            "them. Give both, such as --parameters 25e6 --link 1Gbit."
        )
    total, fastest = sum(speeds), max(speeds)
    gain, exchange = total / fastest, 0.0
    print(
        f"Balanced shares are at most\n  {gain:.2f} times as fast as the fastest device alone "
        f"(sum / largest speed),\n  {total / (n * min(speeds)):.2f} times as fast as equal shares "
        f"(sum / ({n} x smallest speed))."
    )
    if options.link:
        size = 4 * options.parameters
        exchange = ring_bytes(size, n) / options.link
        print(
            f"\nCommunication takes {exchange:.3g} s a step: in a ring of {n} machines each sends "
            f"2 ({n} - 1) / {n} times\nthe gradients, {size / 1e6:.4g} MB in float32, at "
            f"{options.link / 1e6:.4g} MB/s."
        )
    if options.batch:
        gain = _show_steps(speeds, options.batch, exchange)
    if gain < _LEAST_GAIN:
        less = ", or exchange less often with keras_het.callbacks.LocalTraining" * bool(exchange)
        print(f"\nA gain of {gain:.2f} is little: use the fastest device alone{less}.")
    return 0


def _show_steps(speeds: Sequence[float], batch: int, exchange: float) -> float:
    """Print the steps of a batch; return the gain over the fastest device alone."""
    balanced = min_max_shares_linear(0, [1 / speed for speed in speeds], batch).tolist()
    alone = [batch * (place == speeds.index(max(speeds))) for place in range(len(speeds))]
    cases = {
        "balanced": (balanced, exchange),
        "equal shares": (apportion(batch, [1] * len(speeds)), exchange),
        "fastest alone": (alone, 0.0),
    }
    steps: list[float] = []
    print(f"\n{f'batch of {batch}':20}{'time':>8}  balanced gains  shares")
    for name, (shares, added) in cases.items():
        steps.append(added + max(map(truediv, shares, speeds)))
        gain = f"{steps[-1] / steps[0]:14.2f}"
        print(f"{name:20}{steps[-1]:8.4g}  {gain}  {' + '.join(map(str, shares))}")
    communication = " + communication, not overlapped" * bool(exchange)
    print(f"Time: largest share / speed{communication}; seconds if speeds are samples/s.")
    return steps[-1] / steps[0]
