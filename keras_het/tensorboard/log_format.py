"""How a log is laid out: its files, its tags and what their values mean."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from keras_het.planning.diagnosis.recording import PHASES, Device, PipelineRecord, StageRecord
from keras_het.planning.pipeline import Event, Timeline

PLUGIN = "keras_het"
MOST_DEVICES = 1024
_MOST_QUANTITIES, _LONGEST_NAME = 100, 200
_LARGEST_NUMBER = 1e18
_DIGITS = 7  # of a second's fraction
VERSION = 1
DIRECTORY = "telemetry"
"""Folder below the log directory in which the files of a training are."""

FILE_PREFIX = "events.out.tfevents."
FILE_SUFFIX = ".keras_het"

ROWS = (*PHASES, "share")
"""What the rows of a block of steps hold: seconds, and samples in the last one."""

ORDER = ("lowest", "median", "highest")
"""What a thinned block has of each window of steps, in the order of its second axis."""

SETUP = "keras_het/setup"  # who takes part, as JSON; the texts below are JSON, too
STEPS = "keras_het/steps"  # [steps, ROWS, replicas]
# Of the block of STEPS with its time, [steps]: 1 for a step that was measured, 0 for one with the
# values of the next one that was. A block without it has measured steps only.
MEASURED = "keras_het/measured"
THINNED = "keras_het/thinned_"  # and a number of steps: [rows, ORDER, ROWS, replicas]
HARDWARE_SAMPLES = "keras_het/hardware"  # [replicas, quantities], in the order of the setup
CHANGES = "keras_het/changes"  # what was changed while the model trained
PAUSES = "keras_het/pauses"  # seconds between two epochs
ASYNC = "keras_het/async"  # exchanges of workers outside the sync group
PLAN = "keras_het/plan"  # the stages of a model and the predicted passes of a step
PASSES = "keras_het/passes"  # the measured passes of one step
TEXTS = (SETUP, CHANGES, PAUSES, ASYNC, PLAN, PASSES)

CURVES: Mapping[str, str] = {
    "heterogeneous/samples_per_second": "Samples that all replicas train on in a second.",
    "heterogeneous/step_seconds": "Mean step time in seconds, stalls included.",
    "heterogeneous/slowest_replica_wait_seconds": "How long the fastest replica waits in a step.",
    "heterogeneous/input_wait_seconds": "How long the slowest input makes a replica wait a step.",
}
"""Curves that TensorBoard's own Scalars tab shows, with their descriptions."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Who takes part in a training, and the process that writes; a log has one of each start."""

    devices: tuple[Device, ...]
    hardware: tuple[str, ...] = ()
    version: int = VERSION
    process: str = ""


def own_files(names: Iterable[str]) -> list[str]:
    """Return those of a directory's files that are of a log, in the order of writing."""
    return sorted(
        name for name in names if name.startswith(FILE_PREFIX) and name.endswith(FILE_SUFFIX)
    )


def thinned_tag(every: int) -> str:
    return f"{THINNED}{every}"


def steps_per_row(tag: str) -> int:
    """Return the steps that a row of a tag's blocks stands for, 0 if it has no steps."""
    if tag == STEPS:
        return 1
    every = tag.removeprefix(THINNED)
    return int(every) if tag.startswith(THINNED) and re.fullmatch("[0-9]{1,6}", every) else 0


def has_numbers(tag: str) -> bool:
    return steps_per_row(tag) > 0 or tag in (HARDWARE_SAMPLES, MEASURED)


def metadata_content() -> bytes:
    return json.dumps({"version": VERSION}).encode()


def setup_text(devices: Sequence[Device], hardware: Sequence[str], process: str = "") -> str:
    setup = Setup(tuple(devices), tuple(hardware), VERSION, process)
    return json.dumps(dataclasses.asdict(setup))


def parse_setup(text: str | bytes) -> Setup:
    """Return the setup of a JSON text; members that a newer version has are left out."""
    known = {field.name for field in dataclasses.fields(Device)} - {"worker"}
    expected = f"A setup is JSON with 1 to {MOST_DEVICES} devices of a training."
    with _refusing(text, expected):
        content = parse_json(text)
        devices = []
        for each in content["devices"][: MOST_DEVICES + 1]:
            texts = {key: str(each[key])[:_LONGEST_NAME] for key in known & each.keys()}
            devices.append(Device(worker=int(each["worker"]), **texts))
        workers = [device.worker for device in devices]
        if not 0 < len(devices) <= MOST_DEVICES or min(workers) < 0 or max(workers) >= 2**31:
            raise ValueError("no devices, too many, or a worker that cannot be")
        hardware = [str(name)[:_LONGEST_NAME] for name in content.get("hardware", ())]
        version = int(content.get("version", VERSION))
        process = str(content.get("process", ""))[:_LONGEST_NAME]
        return Setup(tuple(devices), tuple(hardware[:_MOST_QUANTITIES]), version, process)


@contextlib.contextmanager
def _refusing(text: str | bytes, expected: str) -> Iterator[None]:
    """Turn what goes wrong with a text that may say anything into one kind of error."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{expected} Received: {text[:200]!r}.") from error


def entries_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the JSON text of what has happened at one step, with null for NaN and infinity."""
    plain = [{key: _plain(value) for key, value in each.items()} for each in entries]
    return json.dumps(plain)


def parse_entries(text: str | bytes) -> list[dict[str, Any]]:
    with _refusing(text, "Entries are a list of JSON objects."):
        return [dict(each.items()) for each in parse_json(text)]


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text of a log says: its numbers are finite, and none is huge."""
    try:
        return json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_number)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"A log has JSON texts. Received: {text[:200]!r}, {error}.") from error


def _number(text: str) -> int | float:
    number = float(text)
    if not abs(number) < _LARGEST_NUMBER:
        raise ValueError(f"{text[:20]} is not a number that a log holds")
    return int(text) if number.is_integer() and text.lstrip("-").isdecimal() else number


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # a number of numpy
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plan_text(record: PipelineRecord) -> str:
    return json.dumps(
        {
            "text": record.text,
            "stages": [dataclasses.asdict(stage) for stage in record.stages],
            "predicted": None if record.predicted is None else timeline_values(record.predicted),
        },
        separators=(",", ":"),
    )


def parse_plan(text: str | bytes) -> PipelineRecord:
    """Return the plan of a JSON text; members that a newer version has are left out."""
    with _refusing(text, "A plan is JSON with the stages of a model."):
        content = parse_json(text)
        stages = tuple(
            StageRecord(
                tuple(map(str, each["layers"])),
                tuple(map(int, each["devices"])),
                tuple(map(int, each["micro_batches"])),
                tuple(map(_finite, each.get("memory_bytes", ()))),
                tuple(map(str, each.get("recomputed", ()))),
            )
            for each in content["stages"]
        )
        predicted = content.get("predicted")
        found = None if predicted is None else _timeline(predicted)
        return PipelineRecord(str(content["text"]), stages, found)


def timeline_text(timeline: Timeline) -> str:
    return json.dumps(timeline_values(timeline), separators=(",", ":"))


def timeline_values(timeline: Timeline) -> dict[str, Any]:
    """Return the passes of a step as plain values: [kind, micro-batch, stage, begin, end] each."""
    return {
        "step_seconds": round(timeline.step_seconds, _DIGITS),
        "events": [
            [
                [e.kind, e.micro_batch, e.stage, round(e.begin, _DIGITS), round(e.end, _DIGITS)]
                for e in events
            ]
            for events in timeline.events
        ],
    }


def parse_timeline(text: str | bytes) -> Timeline:
    with _refusing(text, "The passes of a step are JSON with events."):
        return _timeline(parse_json(text))


def _timeline(content: Any) -> Timeline:
    events = tuple(
        tuple(
            Event(str(kind), int(micro_batch), int(stage), _finite(begin), _finite(end))
            for kind, micro_batch, stage, begin, end in of_device
        )
        for of_device in content["events"]
    )
    return Timeline(events, _finite(content["step_seconds"]))


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"A number must be finite. Received: {value!r}.")
    return number
