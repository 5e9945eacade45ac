"""What a log's values say together: one recording of a training, whoever has read them."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_het.planning.diagnosis.recording import (
    PHASES,
    Change,
    Device,
    Floats,
    Generation,
    Integers,
    PipelineRecord,
    Recording,
)
from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_format import MOST_DEVICES, ROWS, Setup, parse_plan

_MEDIAN, _HIGHEST = log_format.ORDER.index("median"), log_format.ORDER.index("highest")
_MOST_PASSES = 500


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the log."""

    tag: str
    step: int
    time: float
    value: Any


@dataclasses.dataclass(frozen=True)
class LogContent:
    """What a log holds."""

    recording: Recording
    every: Integers
    highest: np.ndarray[Any, np.dtype[np.float32]]
    exchanges: tuple[dict[str, Any], ...] = ()
    messages: tuple[str, ...] = ()
    passes: tuple[tuple[int, bytes], ...] = ()
    windows: Integers | None = None
    """Where only some steps were measured: the first and the last step that has a row's values, the
    last of which was measured, int64 of shape [T, 2]."""


class UnreadableLogError(ValueError):
    """A log does not say of which devices it is, or has another form."""


def windows(rows: np.ndarray, every: int) -> np.ndarray:
    """Return the lowest, the median and the highest value of windows of rows, ignoring NaN."""
    num = -(-len(rows) // every)
    padded = np.full((num * every, *rows.shape[1:]), np.nan, rows.dtype)
    padded[: len(rows)] = rows
    ordered = np.sort(padded.reshape(num, every, *rows.shape[1:]), axis=1)  # NaN comes last
    known = np.maximum(np.sum(~np.isnan(ordered), axis=1, keepdims=True), 1)

    def at(place: np.ndarray) -> np.ndarray:
        return np.take_along_axis(ordered, place, axis=1)[:, 0]

    middle = 0.5 * (at((known - 1) // 2) + at(known // 2))
    return np.stack([ordered[:, 0], middle, at(known - 1)], axis=1)


def log_content(values: Iterable[Value], messages: Iterable[str] = ()) -> LogContent:
    """Return what values say, of which the one written last counts where they contradict."""
    try:
        return _content(values, messages)
    except UnreadableLogError:
        raise
    except Exception as error:
        raise UnreadableLogError(
            f"This log does not have the form that keras_het writes. Received: {error!r}. Read it "
            "with the version that wrote it."
        ) from error


def _content(values: Iterable[Value], messages: Iterable[str]) -> LogContent:
    # A training that went back to an earlier step and was continued from there has written these
    # steps twice, perhaps on other devices.
    notes, ordered = list(messages), sorted(values, key=lambda each: each.time)
    parse_setup = functools.cache(log_format.parse_setup)  # each start has the same one
    parsed = _parsed(ordered, log_format.SETUP, parse_setup)
    setups = [(each.time, each.value) for each in parsed]
    if not setups:
        raise UnreadableLogError("This log names no devices: its first record is missing or torn.")
    newest_version = max(setup.version for _, setup in setups)
    if newest_version > log_format.VERSION:
        notes.append(
            f"This log has version {newest_version} of the format; this version of keras_het reads "
            f"version {log_format.VERSION} and may leave something out."
        )
    pipeline, passes = _pipeline(ordered, setups[-1])
    begins = _begins(parsed)
    columns = _Columns(setups, begins, keeps_gone=pipeline is None)
    every, steps, rows, highest, measured = _steps(
        [each for each in ordered if log_format.steps_per_row(each.tag)],
        columns,
        {(e.step, e.time): e.value > 0 for e in ordered if e.tag == log_format.MEASURED},
    )
    missing = np.diff(steps) - every[:-1]
    if np.any(missing > 0):
        row = int(np.argmax(missing > 0))
        notes.append(
            f"{np.sum(missing[missing > 0])} steps are not in this log, the first of them is step "
            f"{steps[row] + every[row]}."
        )

    def entries(tag: str) -> list[Value]:
        return _latest(_parsed(ordered, tag, json.loads))

    changes = [
        Change(each.step, entry["kind"], entry["text"])
        for each in entries(log_format.CHANGES)
        for entry in each.value
    ]
    recording = Recording(
        devices=columns.devices,
        steps=steps,
        **{name: rows[:, ROWS.index(name)] for name in PHASES},
        shares=rows[:, ROWS.index("share")],
        **_hardware(ordered, columns),
        changes=tuple(sorted([*_restarts(begins), *changes], key=lambda each: each.step)),
        pauses=tuple(
            (each.step, float(entry["seconds"]))
            for each in entries(log_format.PAUSES)
            for entry in each.value
        ),
        pipeline=pipeline,
        measured=None if measured.all() else measured,
        generations=columns.generations,
    )
    exchanges = tuple(
        {**entry, "step": each.step} for each in entries(log_format.ASYNC) for entry in each.value
    )
    known = _windows(recording, every)
    return LogContent(recording, every, highest, exchanges, tuple(notes), passes, known)


def _windows(recording: Recording, every: Integers) -> Integers | None:
    if recording.measured is None:
        return None
    ends = np.flatnonzero(recording.measured)
    place = np.searchsorted(ends, np.arange(len(every)))
    # what follows the last measured step belongs to none that is in the log
    last = np.append(ends, len(every) - 1)[place]
    first = np.append(0, ends + 1)[place]
    return np.stack([recording.steps[first], recording.steps[last] + every[last] - 1], axis=1)


def _parsed(values: Sequence[Value], tag: str, parse: Callable[[bytes], Any]) -> list[Value]:
    """Return the values of a tag, instead of each text what it says."""
    return [dataclasses.replace(e, value=parse(e.value)) for e in values if e.tag == tag]


def _begins(setups: Sequence[Value]) -> list[Value]:
    """Return the setups with which generations begin: other processes, or other devices."""
    found: list[Value] = []
    latest = None
    for each in setups:
        present = (each.value.process, each.value.devices)
        if present != latest:
            found.append(each)
        latest = present
    return _latest(found)


def _restarts(begins: Sequence[Value]) -> Iterator[Change]:
    for before, now in itertools.pairwise(begins):
        devices = now.value.devices
        earlier, present = ({*map(_key, each.value.devices)} for each in (before, now))
        counts = (len(earlier - present), "gone"), (len(present - earlier), "new")
        differences = ", ".join(f"{number} {what}" for number, what in counts if number)
        workers, replicas = len({device.worker for device in devices}), len(devices)
        text = f"restart with {_count(workers, 'worker')}, {_count(replicas, 'replica')}"
        yield Change(now.step, "restart", f"{text}: {differences}" if differences else text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _key(device: Device) -> str:
    return device.identity or device.name


class _Columns:
    """Brings the columns of earlier setups into one order: the latest setup's come first."""

    # Devices are known again by their identities. Those that are gone say so in their names; a plan
    # names devices by their places among the present ones, so that there it is only these.

    def __init__(
        self,
        setups: Sequence[tuple[float, Setup]],
        begins: Sequence[Value],
        keeps_gone: bool = True,
    ) -> None:
        self._setups = setups
        present = setups[-1][1].devices
        gone: dict[str, Device] = {}
        for each, following in reversed([*itertools.pairwise(begins)] if keeps_gone else []):
            for device in each.value.devices:
                name = f"{device.name} (until step {following.step - 1})"
                gone.setdefault(_key(device), dataclasses.replace(device, name=name))
        for device in present:
            gone.pop(_key(device), None)
        room = MOST_DEVICES - len(present)
        self._keys = [*map(_key, present), *[*gone][:room]]
        self.devices: tuple[Device, ...] = (*present, *[*gone.values()][:room])
        self.hardware = setups[-1][1].hardware
        of_each = [(each.step, {*map(_key, each.value.devices)}) for each in begins]
        self.generations = tuple(
            Generation(step, places)
            for step, keys in (of_each if keeps_gone and len(begins) > 1 else [])
            if (places := tuple(n for n, key in enumerate(self._keys) if key in keys))
        )

    def setup_of(self, value: Value) -> Setup:
        """Return the setup that was in force."""
        before = bisect.bisect_right(self._setups, value.time, key=lambda each: each[0])
        return self._setups[max(before - 1, 0)][1]

    def take(self, array: np.ndarray, setup: Setup) -> np.ndarray:
        """Columns of an array (its last axis) in the present order; NaN where there is none."""
        known = {_key(device): place for place, device in enumerate(setup.devices)}
        places = [known.get(key, -1) for key in self._keys]
        if setup.devices == self.devices or places == list(range(array.shape[-1])):
            return array
        taken = array[..., np.maximum(places, 0)]
        taken[..., np.array(places) < 0] = np.nan
        return taken


def _steps(
    blocks: Sequence[Value], columns: _Columns, known: Mapping[tuple[int, float], Any]
) -> tuple[Any, Any, Any, Any, Any]:
    """Steps per row [T], steps [T], values and highest values [T, 5, N], and what was measured."""
    parts = []
    limit = np.iinfo(np.int64).max
    for block in reversed(blocks):  # what was written later replaces all from its first step on
        each = log_format.steps_per_row(block.tag)
        array = np.asarray(block.value, np.float32)
        setup = columns.setup_of(block)
        steps = block.step + each * np.arange(len(array))
        kept = int(np.searchsorted(steps, limit))
        array = columns.take(array[:kept], setup)
        middle, high = (array, array) if each == 1 else (array[:, _MEDIAN], array[:, _HIGHEST])
        measured = known.get((block.step, block.time), np.zeros(0, bool))
        if each > 1 or len(measured) != len(steps):
            measured = np.ones(len(steps), bool)
        parts.append((np.full(kept, each), steps[:kept], middle, high, measured[:kept]))
        limit = min(limit, block.step)
    num = len(columns.devices)
    nothing = np.zeros((0, len(ROWS), num), np.float32)
    none = np.zeros(0, np.int64)
    parts.append((none, none, nothing, nothing, none.astype(bool)))
    every, steps, rows, highest, measured = (
        np.concatenate(arrays) for arrays in zip(*reversed(parts), strict=True)
    )
    numbers = every.astype(np.int64), steps.astype(np.int64)
    return (*numbers, rows.astype(np.float64), highest, measured)


def _hardware(values: Sequence[Value], columns: _Columns) -> dict[str, Any]:
    samples = [
        (each, columns.setup_of(each))
        for each in _latest(each for each in values if each.tag == log_format.HARDWARE_SAMPLES)
    ]
    arrays: dict[str, Floats] = {
        name: np.full((len(samples), len(columns.devices)), np.nan) for name in columns.hardware
    }
    for row, (each, setup) in enumerate(samples):
        taken = columns.take(np.array(each.value, np.float64).T, setup)
        for name, of_devices in zip(setup.hardware, taken, strict=False):
            if name in arrays:
                arrays[name][row] = of_devices
    steps = np.array([each.step for each, _ in samples], np.int64)
    return {"hardware": arrays, "hardware_steps": steps}


def _pipeline(
    values: Sequence[Value], setup: tuple[float, Setup]
) -> tuple[PipelineRecord | None, tuple[tuple[int, bytes], ...]]:
    plans = _parsed(values, log_format.PLAN, parse_plan)
    if not plans or plans[-1].time < setup[0]:
        return None, ()
    passes = _latest([each for each in values if each.tag == log_format.PASSES])
    passes = [each for each in passes if each.time >= plans[-1].time]
    return plans[-1].value, tuple((each.step, each.value) for each in passes[-_MOST_PASSES:])


def _latest(values: Iterable[Value]) -> list[Value]:
    """Values of a tag, of which each has replaced earlier ones from its step on."""
    kept: list[Value] = []
    for each in values:
        while kept and kept[-1].step >= each.step:
            kept.pop()
        kept.append(each)
    return kept
