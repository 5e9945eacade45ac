"""Faults that programmers could make; `deliberate_faults.txt` has one after the other.

Each is a sentence, the file it is in and the tests that find it, what stands once in the file
("- ") and what takes its place ("+ "). The sign ⏎ is the end of a line.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

TABLE = Path(__file__).parent / "deliberate_faults.txt"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of one line.

    Args:
        sentence: what is wrong with it.
        file: path of the file it is in, from the root of the checkout.
        text: what stands once in the file.
        replacement: what takes its place.
        tests: files, or tests of them, below `tests`.
    """

    sentence: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]


def read_faults(text: str) -> tuple[Fault, ...]:
    """Read a table; faults are divided by empty lines, and lines of `#` are headings."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(
        _read(entry.splitlines()) for entry in "\n".join(lines).split("\n\n") if entry.strip()
    )


def _read(lines: list[str]) -> Fault:
    sentence, place, old, new = (line for line in lines if line)
    file, *tests = place.split()
    if not (old.startswith("- ") and new.startswith("+ ")):
        raise ValueError(
            f"A fault has four lines: sentence, file and tests, '- ' and '+ '. Received: {lines}."
        )
    text, replacement = (line[2:].replace("⏎", "\n") for line in (old, new))
    return Fault(sentence, file, text, replacement, tuple(tests))


FAULTS = read_faults(TABLE.read_text())
