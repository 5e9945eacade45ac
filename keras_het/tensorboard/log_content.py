"""What a log's values say together: one recording of a training, whoever has read them."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
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
from keras_het.planning.diagnosis.steps import LONGEST_SECONDS
from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_format import MOST_DEVICES, ROWS, Setup, parse_plan

_MEDIAN, _HIGHEST = log_format.ORDER.index("median"), log_format.ORDER.index("highest")
_MOST_PASSES, _MOST_TEXTS = 500, 100_000
# What a log of a training cannot have; within this, whatever it says is shown.
_LAST_STEP = 2**50
_LAST_TIME = 1e11  # a wall time in seconds: in the year 5138
_LONGEST_TEXT, _LONGEST_TAG = 2**22, 60
_LARGEST_SHARE, _LARGEST_SAMPLE, _LARGEST_BLOCK = 1e9, 1e18, 2**24


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


class Lost:
    """What could not be read: how many values, and why the first of them."""

    number, _first = 0, ""

    def add(self, value: Value, reason: str) -> None:
        self._first = self._first or f"{value.tag[:_LONGEST_TAG]} of step {value.step}: {reason}"
        self.number += 1

    def __str__(self) -> str:
        values = "1 value" if self.number == 1 else f"{self.number} values"
        return f"{values} could not be read. {self._first}" if self.number else ""


class NoSetupError(ValueError):
    """A log does not say of which devices it is."""


def windows(rows: Any, every: int) -> Any:
    """Return the lowest, the median and the highest value of windows of rows, ignoring NaN."""
    num = -(-len(rows) // every)
    padded = np.full((num * every, *rows.shape[1:]), np.nan, rows.dtype)
    padded[: len(rows)] = rows
    ordered = np.sort(padded.reshape(num, every, *rows.shape[1:]), axis=1)  # NaN comes last
    known = np.maximum(np.sum(~np.isnan(ordered), axis=1, keepdims=True), 1)

    def at(place: Any) -> Any:
        return np.take_along_axis(ordered, place, axis=1)[:, 0]

    middle = 0.5 * (at((known - 1) // 2) + at(known // 2))
    return np.stack([ordered[:, 0], middle, at(known - 1)], axis=1)


def is_readable(value: Value) -> bool:
    """Tell whether a value is of the kind that its tag says, with numbers that can be."""
    content, tag = value.value, value.tag
    if not (0 <= value.step <= _LAST_STEP and 0 <= value.time <= _LAST_TIME):  # nor NaN
        return False
    if tag in log_format.TEXTS:
        return isinstance(content, bytes) and len(content) <= _LONGEST_TEXT
    every = log_format.steps_per_row(tag)
    if not log_format.has_numbers(tag):
        return content is not None and not tag.startswith(log_format.THINNED)
    if not isinstance(content, np.ndarray) or content.dtype.kind != "f":
        return False
    if not 0 < content.size <= _LARGEST_BLOCK:
        return False
    if tag == log_format.MEASURED:
        return content.ndim == 1
    if not every:
        return content.ndim == 2 and not np.any(np.abs(content) > _LARGEST_SAMPLE)
    if content.ndim != (3 if every == 1 else 4) or content.shape[-2] != len(ROWS):
        return False
    times, shares = content[..., :-1, :], content[..., -1, :]
    return not (np.any(np.abs(times) > LONGEST_SECONDS) or np.any(np.abs(shares) > _LARGEST_SHARE))


def log_content(values: Iterable[Value], messages: Iterable[str] = ()) -> LogContent:
    """Return what values say, of which the one written last counts where they contradict."""
    # A training that went back to an earlier step and was continued from there has written these
    # steps twice, perhaps on other devices.
    notes, lost = list(messages), Lost()
    ordered = sorted(_undamaged(values, lost), key=lambda each: each.time)
    parse_setup = functools.cache(log_format.parse_setup)  # each start has the same one
    parsed = _parsed(ordered, log_format.SETUP, parse_setup, lost)
    setups = [(each.time, each.value) for each in parsed]
    if not setups:
        raise NoSetupError(
            f"This log names no devices: its first record is missing or torn. {lost}".rstrip()
        )
    newest_version = max(setup.version for _, setup in setups)
    if newest_version > log_format.VERSION:
        notes.append(
            f"This log has version {newest_version} of the format; this version of keras_het reads "
            f"version {log_format.VERSION} and may leave something out."
        )
    pipeline, passes = _pipeline(ordered, setups[-1], lost)
    begins = _begins(parsed)
    columns = _Columns(setups, begins, lost, keeps_gone=pipeline is None)
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
        return _parsed(ordered, tag, log_format.parse_entries, lost)

    changes = [
        Change(each.step, str(entry.get("kind", "")), str(entry.get("text", "")))
        for each in _latest(entries(log_format.CHANGES))
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
            for each in _latest(entries(log_format.PAUSES))
            for entry in each.value
            if isinstance(entry.get("seconds"), int | float)
            and 0 <= entry["seconds"] <= LONGEST_SECONDS
        ),
        pipeline=pipeline,
        measured=None if measured.all() else measured,
        generations=columns.generations,
    )
    exchanges = tuple(
        {**entry, "step": each.step}
        for each in _latest(entries(log_format.ASYNC))
        for entry in each.value
    )
    known = _windows(recording, every)
    notes += [str(lost)] if lost.number else []
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


def _undamaged(values: Iterable[Value], lost: Lost) -> Iterator[Value]:
    for each in values:
        if is_readable(each):
            yield each
        else:
            lost.add(each, "damaged.")


def _parsed(
    values: Sequence[Value], tag: str, parse: Callable[[bytes], Any], lost: Lost
) -> list[Value]:
    """Return the values of a tag, in the place of each text what it says."""
    found = []
    for each in [each for each in values if each.tag == tag][-_MOST_TEXTS:]:
        try:
            found.append(dataclasses.replace(each, value=parse(each.value)))
        except ValueError as error:
            lost.add(each, str(error))
    return found


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
    """Brings the columns of earlier setups into one order: those of the latest one come first."""

    # Devices are known again by their identities. Those that are gone say so in their names; a plan
    # names devices by their places among the present ones, so that there it is only these.

    def __init__(
        self,
        setups: Sequence[tuple[float, Setup]],
        begins: Sequence[Value],
        lost: Lost,
        keeps_gone: bool = True,
    ) -> None:
        self._setups = setups
        self._lost = lost
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

    def setup_of(self, value: Value, num_replicas: int) -> Setup | None:
        """Return the setup that was in force, None if it has not so many replicas."""
        before = bisect.bisect_right(self._setups, value.time, key=lambda each: each[0])
        setup = self._setups[max(before - 1, 0)][1]
        if len(setup.devices) == num_replicas:
            return setup
        self._lost.add(value, f"the setup does not have {num_replicas} replicas.")
        return None

    def take(self, array: Any, setup: Setup) -> Any:
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
        setup = columns.setup_of(block, array.shape[-1])
        if setup is None:
            continue
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
        (each, setup)
        for each in _latest(each for each in values if each.tag == log_format.HARDWARE_SAMPLES)
        if (setup := columns.setup_of(each, len(each.value))) is not None
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
    values: Sequence[Value], setup: tuple[float, Setup], lost: Lost
) -> tuple[PipelineRecord | None, tuple[tuple[int, bytes], ...]]:
    plans = _parsed(values, log_format.PLAN, parse_plan, lost)
    if not plans or plans[-1].time < setup[0]:
        return None, ()
    record = plans[-1].value
    devices = range(len(setup[1].devices))
    known = all(device in devices for stage in record.stages for device in stage.devices)
    if not known or (record.predicted and len(record.predicted.events) != len(devices)):
        lost.add(plans[-1], "a plan with devices that the setup does not have.")
        return None, ()
    passes = _latest([each for each in values if each.tag == log_format.PASSES])
    passes = [each for each in passes if each.time >= plans[-1].time]
    return record, tuple((each.step, each.value) for each in passes[-_MOST_PASSES:])


def _latest(values: Iterable[Value]) -> list[Value]:
    """Values of a tag, of which each has replaced earlier ones from its step on."""
    kept: list[Value] = []
    for each in values:
        while kept and kept[-1].step >= each.step:
            kept.pop()
        kept.append(each)
    return kept
