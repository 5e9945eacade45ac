"""What a log's values say together: one recording of a training, whoever has read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from keras_het.planning.diagnosis.pipeline_record import PipelineRecord
from keras_het.planning.diagnosis.recording import (
    PHASES,
    Device,
    Floats,
    Integers,
    Recording,
)
from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_format import ROWS, Setup
from keras_het.tensorboard.pipeline_format import parse_plan

_MEDIAN, _HIGHEST = log_format.ORDER.index("median"), log_format.ORDER.index("highest")
_TEXTS = (
    *(log_format.SETUP, log_format.CHANGES, log_format.ASYNC),
    *(log_format.PLAN, log_format.PASSES, log_format.PAUSES),
)
_MOST_PASSES = 500


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the log.

    Args:
        tag: its tag.
        step: its step.
        time: wall time at which it was written, in seconds.
        value: an array, or the bytes of a JSON text.
    """

    tag: str
    step: int
    time: float
    value: Any


@dataclasses.dataclass(frozen=True)
class LogContent:
    """What a log holds.

    Args:
        recording: times, shares, hardware and changes; a row of old steps has their medians.
        every: int64 of shape [T], the steps that each row of the recording stands for.
        highest: float32 of shape [T, 5, N], the highest value of those steps; rows as in `ROWS`.
        exchanges: exchanges of async workers, each with its "step".
        messages: what could not be read, for people.
        passes: measured passes of some steps of the recording's pipeline, oldest first: the
            number of the step, and the JSON text.
    """

    recording: Recording
    every: Integers
    highest: np.ndarray[Any, np.dtype[np.float32]]
    exchanges: tuple[dict[str, Any], ...] = ()
    messages: tuple[str, ...] = ()
    passes: tuple[tuple[int, bytes], ...] = ()


class NoSetupError(ValueError):
    """A log does not say of which devices it is."""


def is_readable(value: Value) -> bool:
    """Tell whether a value is of the kind that its tag says: what is damaged may be anything."""
    content = value.value
    if value.step < 0:
        return False
    if value.tag in _TEXTS:
        return isinstance(content, (bytes, str))
    every = log_format.steps_per_row(value.tag)
    if not every and value.tag != log_format.HARDWARE_SAMPLES:
        return True
    if getattr(getattr(content, "dtype", None), "kind", "") not in ("f", "i", "u"):
        return False
    if not every:
        return bool(content.ndim == 2)
    return bool(content.ndim == (3 if every == 1 else 4) and content.shape[-2] == len(ROWS))


def log_content(values: Iterable[Value]) -> LogContent:
    """Return what values say, of which the one written last counts where they contradict.

    A training that went back to an earlier step and was continued from there has written these
    steps twice, perhaps on other devices. The columns are those of the latest setup. A damaged
    value is left out, and `messages` says so.

    Args:
        values: of one training, in any order.

    Raises:
        NoSetupError: if there is no setup among them.
    """
    messages: dict[str, None] = {}
    ordered = _undamaged(sorted(values, key=lambda each: each.time), messages)
    setups = _setups(ordered, messages)
    if not setups:
        raise NoSetupError("This log names no devices: its first record is missing or torn.")
    columns = _Columns(setups, messages)
    every, steps, rows, highest = _steps(
        [each for each in ordered if log_format.steps_per_row(each.tag)], columns
    )
    pipeline, passes = _pipeline(ordered, setups[-1], messages)
    recording = Recording(
        devices=columns.devices,
        steps=steps,
        **{name: rows[:, ROWS.index(name)] for name in PHASES},
        shares=rows[:, ROWS.index("share")],
        **_hardware(ordered, columns),
        changes=tuple(
            change
            for each in _latest(ordered, log_format.CHANGES)
            for change in log_format.parse_changes(each.step, each.value)
        ),
        pauses=tuple(
            (each.step, float(entry["seconds"]))
            for each in _latest(ordered, log_format.PAUSES)
            for entry in log_format.parse_entries(each.value)
            if isinstance(entry.get("seconds"), int | float) and 0 <= entry["seconds"] < np.inf
        ),
        pipeline=pipeline,
    )
    exchanges = tuple(
        {**entry, "step": each.step}
        for each in _latest(ordered, log_format.ASYNC)
        for entry in log_format.parse_entries(each.value)
    )
    return LogContent(recording, every, highest, exchanges, tuple(messages), passes)


def _undamaged(values: Sequence[Value], messages: dict[str, None]) -> list[Value]:
    """Return the values that can be read, and note which cannot."""
    damaged: dict[str, list[int]] = {}
    for each in values:
        if not is_readable(each):
            damaged.setdefault(each.tag, []).append(each.step)
    for tag, steps in damaged.items():
        number = "1 value" if len(steps) == 1 else f"{len(steps)} values"
        messages[
            f"{number} of {tag} could not be read, the first at step {steps[0]}: damaged, and left "
            "out."
        ] = None
    return [each for each in values if is_readable(each)] if damaged else list(values)


def _setups(values: Sequence[Value], messages: dict[str, None]) -> list[tuple[float, Setup]]:
    setups = []
    for each in values:
        if each.tag == log_format.SETUP:
            try:
                setup = log_format.parse_setup(each.value)
            except ValueError as error:
                messages[str(error)] = None
                continue
            setups.append((each.time, setup))
            if setup.version > log_format.VERSION:
                messages[
                    f"This log has version {setup.version} of the format; this version of "
                    f"keras_het reads version {log_format.VERSION} and may leave something out."
                ] = None
    return setups


class _Columns:
    """Brings the columns of earlier setups into the order of the latest one."""

    def __init__(self, setups: Sequence[tuple[float, Setup]], messages: dict[str, None]) -> None:
        self._setups = setups
        self._messages = messages
        self.devices: tuple[Device, ...] = setups[-1][1].devices
        self.hardware = setups[-1][1].hardware

    def setup_of(self, value: Value, num_replicas: int) -> Setup | None:
        """The setup that was in force, if it has so many replicas; else one that has."""
        fitting = [
            (time, setup) for time, setup in self._setups if len(setup.devices) == num_replicas
        ]
        if not fitting:
            self._messages[
                f"Values of {num_replicas} replicas were left out: no setup has so many."
            ] = None
            return None
        before = [setup for time, setup in fitting if time <= value.time]
        return before[-1] if before else fitting[0][1]

    def places(self, setup: Setup) -> list[int]:
        """For each present device its column in an earlier setup, -1 if it had none."""
        if setup.devices == self.devices:
            return list(range(len(self.devices)))
        known = {device.name: place for place, device in enumerate(setup.devices)}
        return [known.get(device.name, -1) for device in self.devices]

    def take(self, array: Any, setup: Setup) -> Any:
        """Columns of an array (its last axis) in the present order; NaN where there is none."""
        places = self.places(setup)
        if places == list(range(array.shape[-1])):
            return array
        taken = array[..., np.maximum(places, 0)]
        taken[..., np.array(places) < 0] = np.nan
        return taken


def _steps(blocks: Sequence[Value], columns: _Columns) -> tuple[Any, Any, Any, Any]:
    """Steps per row [T], steps [T], values [T, 5, N] and highest values [T, 5, N]."""
    parts = []
    limit = np.iinfo(np.int64).max
    for block in reversed(blocks):  # what was written later replaces all from its first step on
        each = log_format.steps_per_row(block.tag)
        array = np.asarray(block.value, np.float32)
        setup = columns.setup_of(block, array.shape[-1])
        if setup is None:
            continue
        steps = block.step + each * np.arange(len(array))
        kept = int(np.searchsorted(steps, limit))
        array = columns.take(array[:kept], setup)
        middle, high = (array, array) if each == 1 else (array[:, _MEDIAN], array[:, _HIGHEST])
        parts.append((np.full(kept, each), steps[:kept], middle, high))
        limit = min(limit, block.step)
    num = len(columns.devices)
    nothing = np.zeros((0, len(ROWS), num), np.float32)
    parts.append((np.zeros(0, np.int64), np.zeros(0, np.int64), nothing, nothing))
    every, steps, rows, highest = (
        np.concatenate(arrays) for arrays in zip(*reversed(parts), strict=True)
    )
    return every.astype(np.int64), steps.astype(np.int64), rows.astype(np.float64), highest


def _hardware(values: Sequence[Value], columns: _Columns) -> dict[str, Any]:
    samples = [
        each
        for each in _latest(values, log_format.HARDWARE_SAMPLES)
        if columns.setup_of(each, len(each.value)) is not None
    ]
    arrays: dict[str, Floats] = {
        name: np.full((len(samples), len(columns.devices)), np.nan) for name in columns.hardware
    }
    for row, each in enumerate(samples):
        setup = columns.setup_of(each, len(each.value))
        if setup is None:
            continue
        taken = columns.take(np.array(each.value, np.float64).T, setup)
        for name, of_devices in zip(setup.hardware, taken, strict=False):
            if name in arrays:
                arrays[name][row] = of_devices
    steps = np.array([each.step for each in samples], np.int64)
    return {"hardware": arrays, "hardware_steps": steps}


def _pipeline(
    values: Sequence[Value], setup: tuple[float, Setup], messages: dict[str, None]
) -> tuple[PipelineRecord | None, tuple[tuple[int, bytes], ...]]:
    """Return the plan of the latest setup, if it has one, and the passes measured with it."""
    plans = [each for each in values if each.tag == log_format.PLAN]
    if not plans or plans[-1].time < setup[0]:
        return None, ()
    try:
        record = parse_plan(plans[-1].value)
    except ValueError as error:
        messages[str(error)] = None
        return None, ()
    devices = range(len(setup[1].devices))
    known = all(device in devices for stage in record.stages for device in stage.devices)
    if not known or (record.predicted and len(record.predicted.events) != len(devices)):
        messages["A plan was left out: it has devices that the setup has not."] = None
        return None, ()
    begin = plans[-1].time
    for each in reversed(plans):
        if each.value != plans[-1].value:
            break
        begin = each.time
    passes = [each for each in _latest(values, log_format.PASSES) if each.time >= begin]
    return record, tuple((each.step, each.value) for each in passes[-_MOST_PASSES:])


def _latest(values: Sequence[Value], tag: str) -> list[Value]:
    """Values of a tag, of which each has replaced earlier ones from its step on."""
    kept: list[Value] = []
    for each in values:
        if each.tag == tag:
            while kept and kept[-1].step >= each.step:
                kept.pop()
            kept.append(each)
    return kept
