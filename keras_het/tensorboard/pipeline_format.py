"""Plans of pipelines and the passes of a step as JSON, for the log and for the page."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from keras_het.planning.diagnosis.recording import PipelineRecord, StageRecord
from keras_het.planning.pipeline import Event, Timeline
from keras_het.tensorboard.log_format import parse_json

_DIGITS = 7  # of a second's fraction


def plan_text(record: PipelineRecord) -> str:
    """Return the JSON text of a plan."""
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
    try:
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
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"A plan is JSON with the stages of a model. Received: {text[:200]!r}."
        ) from error


def timeline_text(timeline: Timeline) -> str:
    """Return the JSON text of the passes of a step."""
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
    """Return the passes of a step of a JSON text."""
    try:
        return _timeline(parse_json(text))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"The passes of a step are JSON with events. Received: {text[:200]!r}."
        ) from error


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
