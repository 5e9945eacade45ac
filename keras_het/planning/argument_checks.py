"""Errors for arguments that are not among the choices, or out of range."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_one_of(name: str, value: object, choices: Sequence[str], otherwise: str = "") -> None:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        *first, last = (f'"{choice}"' for choice in choices)
        expected = f"{', '.join(first)} or {last}{otherwise}"
        raise ValueError(
            f"{name} must be {expected}. Received: {name}={value!r}. Choose one of them."
        )


def check_number(
    name: str,
    value: float | str | None,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    whole: bool = False,
    otherwise: str = "",
) -> None:
    """Refuse a value that is not a number, or is out of range; None passes."""
    if value is None:
        return
    is_none = isinstance(value, (str, bool)) or (whole and value % 1 != 0)
    number = math.nan if is_none else float(value)  # NaN is within no range
    if not (least <= number <= most and number > above):
        kind = "a whole number" if whole else "a number"
        bounds = {"of at least": least, "above": above, "of at most": most}
        limits = [f"{words} {bound}" for words, bound in bounds.items() if math.isfinite(bound)]
        expected = f"{kind} {' and '.join(limits)}{otherwise}"
        raise ValueError(f"{name} must be {expected}. Received: {name}={value!r}.")
