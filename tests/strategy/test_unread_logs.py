"""Logs of a device that works ahead look like any dict of numbers, and wait for a first look."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from keras_het.strategy.measure import late_reads
from keras_het.strategy.measure.late_reads import StepLogs, UnreadLogs

NUMBERS = {"loss": 1.5, "mae": 2.0}


def unread() -> UnreadLogs:
    return UnreadLogs(StepLogs({name: tf.constant(value) for name, value in NUMBERS.items()}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often somebody has waited for the device."""
    found: list[None] = []
    monkeypatch.setattr(late_reads, "until_computed", lambda: lambda: found.append(None))
    return found


LOOKS: dict[str, Callable[[Any], Any]] = {
    "items": lambda logs: dict(logs.items()),
    "item": lambda logs: {name: logs[name] for name in logs},
    "get": lambda logs: {name: logs.get(name) for name in NUMBERS},
    "values": lambda logs: dict(zip(logs.keys(), logs.values(), strict=True)),
    "dict": dict,
    "stars": lambda logs: {**logs},
    "arguments": lambda logs: dict(**logs),
    "or": lambda logs: {} | logs,
    "update": lambda logs: [found := {}, found.update(logs)][0],
    "copy": lambda logs: logs.copy(),
    "copied": copy.copy,
    "deep": copy.deepcopy,
    "json": lambda logs: json.loads(json.dumps(logs)),
    "pop": lambda logs: {name: logs.pop(name) for name in NUMBERS},
    "equal": lambda logs: NUMBERS if logs == NUMBERS else None,
    "text": lambda logs: json.loads(repr(logs).replace("'", '"')),
}


@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_finds_numbers(look: str, waits: list[None]) -> None:
    found = LOOKS[look](unread())
    assert dict(found) == NUMBERS and all(type(value) is float for value in found.values())
    assert waits


def test_names_are_no_reason_to_wait(waits: list[None]) -> None:
    logs = unread()
    assert logs and len(logs) == 2 and "loss" in logs
    assert isinstance(logs, dict) and not waits
    logs["own"] = 3.0
    assert logs["loss"] + logs["own"] == 4.5
    assert logs["mae"] == 2.0 and len(waits) == 1
