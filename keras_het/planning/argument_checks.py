"""Errors for arguments that are not among the choices, out of range, or of another type."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any


def expect(is_right: bool, expected: str, **given: object) -> None:
    """Refuse the argument that is given if it is not right."""
    if not is_right:
        ((name, value),) = given.items()
        raise ValueError(f"{name} must be {expected}. Received: {name}={value!r}.")


def check_one_of(name: str, value: object, choices: Sequence[object], otherwise: str = "") -> None:
    """Refuse a value that is not among the choices."""
    *first, last = (f'"{each}"' if isinstance(each, str) else str(each) for each in choices)
    expected = f"{', '.join(first)} or {last}{otherwise}"
    expect(value in choices, expected, **{name: value})


def check_flag(name: str, value: object) -> None:
    check_one_of(name, value, (True, False))


def check_verbose(value: object) -> None:
    check_one_of("verbose", value, (0, 1, 2))


def check_folder(name: str, value: object, or_none: bool = False) -> None:
    """Refuse what is not the path of a folder, there or to be made."""
    is_path = isinstance(value, (str, os.PathLike)) and value != "" and not Path(value).is_file()
    expect(
        is_path or (value is None and or_none),
        "the path of a folder, which may not be there yet",
        **{name: value},
    )


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    whole: bool = False,
    or_none: bool = False,
    otherwise: str = "",
) -> None:
    """Refuse a value that is not a number, or is out of range."""
    if value is None and or_none:
        return
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    # NaN is within no range, and infinity leaves no whole rest
    is_within = is_number and least <= value <= most and above < value < below
    if is_within and not (whole and value % 1 != 0):
        return
    kind = "a whole number" if whole else "a number"
    bounds = {"of at least": least, "above": above, "of at most": most, "below": below}
    limits = [f"{words} {bound}" for words, bound in bounds.items() if math.isfinite(bound)]
    expect(False, f"{kind} {' and '.join(limits)}{otherwise}", **{name: value})
