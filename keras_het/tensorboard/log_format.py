"""How a log is laid out: its files, its tags and what their values mean."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from keras_het.planning.diagnosis.recording import PHASES, Change, Device

PLUGIN = "keras_het"
VERSION = 1
DIRECTORY = "telemetry"
"""Folder below the log directory in which the files of a training are."""

FILE_PREFIX = "events.out.tfevents."
FILE_SUFFIX = ".keras_het"

ROWS = (*PHASES, "share")
"""What the rows of a block of steps hold: seconds, and samples in the last one."""

ORDER = ("lowest", "median", "highest")
"""What a thinned block has of each window of steps, in the order of its second axis."""

SETUP = "keras_het/setup"
STEPS = "keras_het/steps"
THINNED = "keras_het/thinned_"
HARDWARE_SAMPLES = "keras_het/hardware"
CHANGES = "keras_het/changes"
PAUSES = "keras_het/pauses"
ASYNC = "keras_het/async"
PLAN = "keras_het/plan"
PASSES = "keras_het/passes"

CURVES: Mapping[str, str] = {
    "heterogeneous/samples_per_second": "Samples that all replicas train on in a second.",
    "heterogeneous/step_seconds": "Mean step time in seconds, stalls included.",
    "heterogeneous/slowest_wait": "Seconds of a step that the fastest replica waits for others.",
    "heterogeneous/input_wait": "Seconds of a step that the slowest input makes a replica wait.",
}
"""Curves that TensorBoard's own Scalars tab shows, with their descriptions."""

_DESCRIPTIONS = {
    SETUP: "The devices of the replicas and the names of hardware quantities, as JSON.",
    STEPS: f"[steps, {len(ROWS)}, replicas]: {', '.join(ROWS)}.",
    THINNED: f"[windows, {len(ORDER)}, {len(ROWS)}, replicas]: {', '.join(ORDER)} of old steps.",
    HARDWARE_SAMPLES: "[replicas, quantities], in the order of the setup's names.",
    CHANGES: "What was changed while the model trained, as JSON.",
    PAUSES: "Seconds between two epochs, as JSON.",
    ASYNC: "Exchanges of workers outside the sync group, as JSON.",
    PLAN: "The stages of a model and the predicted passes of a step, as JSON.",
    PASSES: "The measured passes of one step of a model in stages, as JSON.",
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """Who takes part in a training.

    Args:
        devices: the devices of the N replicas, in the order of a block's columns.
        hardware: names of the H quantities, in the order of a sample's columns.
        version: version of the format that wrote it.
    """

    devices: tuple[Device, ...]
    hardware: tuple[str, ...] = ()
    version: int = VERSION


def thinned_tag(every: int) -> str:
    """Return the tag of blocks whose rows stand for so many steps each."""
    return f"{THINNED}{every}"


def steps_per_row(tag: str) -> int:
    """Return the steps that a row of a tag's blocks stands for, 0 if it has no steps."""
    if tag == STEPS:
        return 1
    every = tag.removeprefix(THINNED)
    return int(every) if tag.startswith(THINNED) and every.isdecimal() else 0


def description(tag: str) -> str:
    """Return what TensorBoard shows as the description of a tag."""
    return _DESCRIPTIONS.get(THINNED if tag.startswith(THINNED) else tag, CURVES.get(tag, ""))


def metadata_content() -> bytes:
    """Return what the metadata of the plugin's own tags hold."""
    return json.dumps({"version": VERSION}).encode()


def setup_text(devices: Sequence[Device], hardware: Sequence[str]) -> str:
    """Return the JSON text of a setup."""
    return json.dumps(
        {
            "version": VERSION,
            "devices": [dataclasses.asdict(device) for device in devices],
            "hardware": list(hardware),
        }
    )


def parse_setup(text: str | bytes) -> Setup:
    """Return the setup of a JSON text; members that a newer version has are left out.

    Raises:
        ValueError: if the text is not that of a setup.
    """
    known = {field.name: field.type for field in dataclasses.fields(Device)}
    try:
        content = json.loads(text)
        devices = []
        for each in content["devices"]:
            members = {key: value for key, value in each.items() if key in known}
            worker = int(members.pop("worker"))
            devices.append(
                Device(worker=worker, **{key: str(value) for key, value in members.items()})
            )
        hardware = tuple(str(name) for name in content.get("hardware", ()))
        return Setup(tuple(devices), hardware, int(content.get("version", VERSION)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"A setup is JSON with the devices of a training. Received: {text[:200]!r}."
        ) from error


def change_text(changes: Sequence[Change]) -> str:
    """Return the JSON text of the changes of one step: a single one as it is, else a list."""
    return entries_text([{"kind": each.kind, "text": each.text} for each in changes])


def parse_changes(step: int, text: str | bytes) -> list[Change]:
    """Return the changes of a JSON text; none if it is not one of changes."""
    return [
        Change(step, str(each.get("kind", "")), str(each.get("text", "")))
        for each in parse_entries(text)
    ]


def entries_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the JSON text of what has happened at one step, with null for NaN and infinity."""
    plain = [{key: _plain(value) for key, value in each.items()} for each in entries]
    return json.dumps(plain[0] if len(plain) == 1 else plain)


def parse_entries(text: str | bytes) -> list[dict[str, Any]]:
    """Return the entries of a JSON text: one object, or a list of them; none if it is neither."""
    try:
        content = json.loads(text)
    except ValueError:
        return []
    entries = content if isinstance(content, list) else [content]
    return [each for each in entries if isinstance(each, dict)]


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # a number of numpy
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
