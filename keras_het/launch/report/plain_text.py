"""Text and numbers as they are shown: what a log says is not to be trusted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from keras_het.planning.diagnosis.recording import Change, Device, Recording

_MOST_CHARACTERS = 300
UNKNOWN = "–"
_SECONDS_TO_MS = 1e3
_WITHOUT_DECIMALS = 100.0
_LARGE = 1e7
_LARGEST_WORKER = 2**31 - 1


def check_log_dir(
    log_dir: str, is_dir: Callable[[str], bool], exists: Callable[[str], bool]
) -> None:
    if not is_dir(log_dir):
        what = "a file" if exists(log_dir) else "nothing"
        raise FileNotFoundError(
            f"LOGDIR must be the directory that Telemetry(log_dir) was given. Received: "
            f"{log_dir!r}, and there is {what}."
        )


def plain(text: str) -> str:
    """Return one line of printable characters, which cannot drive a terminal or turn the text."""
    cut = text[: _MOST_CHARACTERS + 1]
    line = "".join(
        char if char.isprintable() else " " if char in "\n\r\t" else "\N{REPLACEMENT CHARACTER}"
        for char in cut
    )
    return f"{line[:_MOST_CHARACTERS]}…" if len(cut) > _MOST_CHARACTERS else line


def plain_recording(recording: Recording) -> Recording:
    """Return a recording whose names and texts may be shown."""
    devices = tuple(
        Device(
            plain(device.name) or f"replica {index}",
            min(max(device.worker, -_LARGEST_WORKER), _LARGEST_WORKER),
            plain(device.kind),
            plain(device.host),
            plain(device.model),
        )
        for index, device in enumerate(recording.devices)
    )
    changes = tuple(
        Change(each.step, plain(each.kind), plain(each.text)) for each in recording.changes
    )
    return dataclasses.replace(recording, devices=devices, changes=changes)


def number(value: float) -> str:
    if not math.isfinite(value):
        return UNKNOWN
    if _WITHOUT_DECIMALS <= abs(value) < _LARGE:
        return f"{value:.0f}"
    return f"{value:.3g}"


def milliseconds(seconds: float) -> str:
    return number(seconds * _SECONDS_TO_MS)


def percent(fraction: float) -> str:
    return f"{number(round(fraction * 100, 0) + 0.0)} %" if math.isfinite(fraction) else UNKNOWN


def difference(fraction: float) -> str:
    whole = round(fraction * 100) if math.isfinite(fraction) else 0
    sign = "+" if whole > 0 else ""
    return f"{sign}{whole} %" if math.isfinite(fraction) else UNKNOWN


def score(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else UNKNOWN


def count(amount: int, one: str, several: str = "") -> str:
    return f"{amount} {one if amount == 1 else several or f'{one}s'}"


def change_text(change: Change) -> str:
    text = change.text
    return text if text.startswith(change.kind) else f"{change.kind}: {text}"
