"""What a check says."""

from __future__ import annotations

import dataclasses

OK, NOTE, WARNING, FAULT = "ok", "note", "warning", "fault"
LEVELS = (OK, NOTE, WARNING, FAULT)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is right or wrong."""

    level: str
    text: str
    fix: str = ""
    check: str = ""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"Received: level={self.level!r}; expected one of {LEVELS}.")
        if self.level in (WARNING, FAULT) and not self.fix:
            raise ValueError(f"A problem needs a fix. Received none for {self.text!r}.")


def ok(text: str) -> Finding:
    """Return that something is right."""
    return Finding(OK, text)


def note(text: str, fix: str = "") -> Finding:
    """Return what is good to know."""
    return Finding(NOTE, text, fix)


def warning(text: str, fix: str) -> Finding:
    """Return what makes training slower than it could be."""
    return Finding(WARNING, text, fix)


def fault(text: str, fix: str) -> Finding:
    """Return what makes training fail."""
    return Finding(FAULT, text, fix)
