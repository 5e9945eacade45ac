"""Text and numbers as they are shown: what a log says is not to be trusted."""

from __future__ import annotations

import math

_MOST_CHARACTERS = 300
UNKNOWN = "–"
_WITHOUT_DECIMALS = 100.0
_LARGE = 1e7


def plain(text: str) -> str:
    """Return one line of printable characters, which cannot drive a terminal or turn the text."""
    cut = text[: _MOST_CHARACTERS + 1]
    line = "".join(
        char if char.isprintable() else " " if char in "\n\r\t" else "\N{REPLACEMENT CHARACTER}"
        for char in cut
    )
    return f"{line[:_MOST_CHARACTERS]}…" if len(cut) > _MOST_CHARACTERS else line


def number(value: float | None, factor: float = 1.0) -> str:
    """Return a number times a factor with three digits, a dash where it is unknown."""
    if value is None or not math.isfinite(value * factor):
        return UNKNOWN
    shown = value * factor
    return f"{shown:.0f}" if _WITHOUT_DECIMALS <= abs(shown) < _LARGE else f"{shown:.3g}"


def milliseconds(seconds: float | None) -> str:
    return number(seconds, 1e3)


def count(amount: int, one: str) -> str:
    return f"{amount} {one}{'' if amount == 1 else 's'}"


def change_text(kind: str, text: str) -> str:
    return text if text.startswith(kind) else f"{kind}: {text}"
