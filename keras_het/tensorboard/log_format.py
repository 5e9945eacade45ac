"""How a log is laid out: its files, its tags and what their values mean."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keras_het.planning.diagnosis.recording import PHASES, Device, PipelineRecord, StageRecord
from keras_het.planning.pipeline import Event, Timeline

PLUGIN = "keras_het"
MOST_DEVICES = 1024
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
    """Return the files of a log in a directory, in the order of writing."""
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
    content = json.loads(text)
    known = {field.name for field in dataclasses.fields(Device)}
    devices = tuple(
        Device(**{name: each[name] for name in known & each.keys()}) for each in content["devices"]
    )
    if not 0 < len(devices) <= MOST_DEVICES:
        raise ValueError(f"A log has 1 to {MOST_DEVICES} devices. Received: {len(devices)}.")
    hardware, version = content.get("hardware", ()), content.get("version", VERSION)
    return Setup(devices, tuple(hardware), version, content.get("process", ""))


def entries_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the JSON text of what has happened at one step, with null for NaN and infinity."""
    plain = [{key: _plain(value) for key, value in each.items()} for each in entries]
    return json.dumps(plain)


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
    content = json.loads(text)
    stages = tuple(
        StageRecord(
            *(tuple(each[name]) for name in ("layers", "devices", "micro_batches")),
            *(tuple(each.get(name, ())) for name in ("memory_bytes", "recomputed")),
        )
        for each in content["stages"]
    )
    predicted = content.get("predicted")
    return PipelineRecord(content["text"], stages, predicted and _timeline(predicted))


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
    return _timeline(json.loads(text))


def _timeline(content: Any) -> Timeline:
    events = tuple(tuple(Event(*each) for each in device) for device in content["events"])
    return Timeline(events, content["step_seconds"])
