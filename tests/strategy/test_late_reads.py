"""Values, and logs, are read in the order of their steps, and waited for only when they are due."""

import copy
import gc
import json
import threading

import numpy as np
import pytest
import tensorflow as tf

from keras_het.strategy.measure import late_reads
from keras_het.strategy.measure.late_reads import LateReads, StepLogs, UnreadLogs


class OnDevice:
    """A value that can be read when its step has been computed."""

    def __init__(self, value, error=None):
        self._value, self._error = value, error
        self.is_computed, self.read_by = threading.Event(), ""

    def numpy(self):
        assert self.is_computed.wait(60)
        self.read_by = threading.current_thread().name
        if self._error is not None:
            raise self._error
        return np.array(self._value)


def taken(reads, all_of_them=False):
    return [float(read.value) for read in reads.take(all_of_them)]


def test_a_value_is_waited_for_when_its_device_is_so_many_steps_behind():
    reads, values = LateReads(2), [OnDevice(number) for number in range(4)]
    for value in values[:2]:
        reads.add(value)
        assert taken(reads) == []
    reads.add(values[2])
    threading.Timer(0.05, values[0].is_computed.set).start()
    assert taken(reads) == [0]
    assert values[0].read_by == "keras_het-reads"
    reads.add(values[3])
    for value in values:
        value.is_computed.set()
    assert taken(reads) == [1]
    assert taken(reads, all_of_them=True) == [2, 3]
    assert taken(reads, all_of_them=True) == []


def test_without_a_lag_the_value_is_there_at_once():
    reads, value = LateReads(0), OnDevice(7)
    value.is_computed.set()
    reads.add(value)
    assert taken(reads) == [7]
    assert value.read_by == "MainThread"


def test_an_error_of_a_step_is_raised_where_its_value_is_due():
    reads, values = LateReads(1), [OnDevice(0, ValueError("lost")), OnDevice(1)]
    for value in values:
        value.is_computed.set()
        reads.add(value)
    with pytest.raises(ValueError, match="lost"):
        reads.take()
    assert taken(reads, all_of_them=True) == [1]


def test_values_of_a_training_that_has_ended_are_forgotten():
    reads = LateReads(3)
    reads.add(OnDevice(0))
    reads.clear()
    assert taken(reads, all_of_them=True) == []


def test_the_thread_ends_with_the_last_reference():
    reads, value = LateReads(1), OnDevice(0)
    value.is_computed.set()
    reads.add(value)
    taken(reads, all_of_them=True)
    thread = reads._thread
    del reads
    gc.collect()
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


NUMBERS = {"loss": 1.5, "mae": 2.0}


def unread():
    return UnreadLogs(StepLogs({name: tf.constant(value) for name, value in NUMBERS.items()}))


@pytest.fixture
def waits(monkeypatch):
    """How often somebody has waited for the device."""
    found = []
    monkeypatch.setattr(late_reads, "until_computed", lambda: lambda: found.append(None))
    return found


LOOKS = {
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
def test_who_looks_finds_numbers(look, waits):
    found = LOOKS[look](unread())
    assert dict(found) == NUMBERS and all(type(value) is float for value in found.values())
    assert waits


def test_names_are_no_reason_to_wait(waits):
    logs = unread()
    assert logs and len(logs) == 2 and "loss" in logs
    assert isinstance(logs, dict) and not waits
    logs["own"] = 3.0
    assert logs["loss"] + logs["own"] == 4.5
    assert logs["mae"] == 2.0 and len(waits) == 1
