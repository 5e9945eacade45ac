"""What a verdict says of a cause: who, why with numbers, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_het.planning.diagnosis.remedies import advice_for
from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.suspect import Suspect, seconds_saved

# A device that saves less than half of what the worst one does is not named beside it.
_NAMED = 0.5
_MOST_NAMES = 2
# Percentages that differ by less are shown as one.
_SAME = 0.03


@dataclasses.dataclass(frozen=True)
class Cause:
    """Something that makes steps longer."""

    kind: str
    devices: tuple[int, ...]
    workers: tuple[int, ...]
    share_of_step: float
    text: str
    advice: str

    @property
    def device(self) -> int | None:
        """Index of the worst device, None for a link."""
        return self.devices[0] if self.devices else None

    @property
    def worker(self) -> int | None:
        """Index of the worst device's worker, None for a link."""
        return self.workers[0] if self.workers else None


def cause_of(situation: Situation, suspect: Suspect, last: float) -> Cause:
    """Describe a cause, given the fraction of a step that it costs once the others are fixed."""
    devices = situation.recording.devices
    named = _named_devices(situation, suspect)
    parts_of_named = [part for part in suspect.described if set(part.devices).issubset(named)]
    alone, together = (
        fraction_of_step(situation, seconds_saved(situation, each)[0])
        for each in (parts_of_named, [suspect])
    )
    return Cause(
        suspect.fault.kind,
        suspect.devices,
        tuple(dict.fromkeys(devices[index].worker for index in suspect.devices)),
        alone,
        _text_of(situation, suspect, named, (alone, together, last)),
        advice_for(situation, suspect, of_all=len(named) == len(devices)),
    )


def fraction_of_step(situation: Situation, seconds: float) -> float:
    return min(max(float(seconds / situation.step_seconds), 0.0), 1.0)


def _text_of(
    situation: Situation, suspect: Suspect, named: Sequence[int], costs: tuple[float, float, float]
) -> str:
    """Return who and why, with the fractions of a step that the repair would save."""
    # Of the devices that are named, of all, and of all once the other causes are fixed.
    alone, together, last = costs
    shown = [(alone, " with shares that follow" if suspect.follows else "")]
    others = "such devices" if suspect.fault.is_of_device else "else of this cause"
    for more in ((together, f" with all {others}"), (last, " once the other causes are fixed")):
        if more[0] > shown[-1][0] + _SAME:
            shown.append(more)
    if len(shown) > 1 and alone < _SAME:
        del shown[0]  # it hides behind the others
    (first, ends), *rest = shown
    part = f"{first * 100:.0f} % of every step"
    if rest:
        ends += f" ({', '.join(f'{cost * 100:.0f} %{condition}' for cost, condition in rest)})"
    since = situation.windows.since_speed
    if suspect.fault.since and since is not None:
        ends += f", since about step {since}"
    what = f"{_who(situation, suspect, named)} {suspect.fault.why}"
    if suspect.fault.kind == "link":
        return f"{what}; that costs {part}{ends}."
    if suspect.fault.kind == "slow_device" and not suspect.follows and len(situation.shares) > 1:
        return f"{what}, and {part} waits for it{ends}."
    return f"{what}, which costs {part}{ends}."


def _who(situation: Situation, suspect: Suspect, named: Sequence[int]) -> str:
    if suspect.fault.kind == "link":
        return "The exchange of gradients"
    devices = [situation.recording.devices[index] for index in named]
    if suspect.fault.is_of_device:
        others, what = [device.name for device in devices[1:]], "devices"
        first = devices[0].name
    else:
        workers = sorted({device.worker for device in devices} - {devices[0].worker})
        others, what = [f"worker {worker}" for worker in workers], "workers"
        first = f"worker {devices[0].worker}"
    return f"{first}, like {listed(others, what)}," if others else first


def _named_devices(situation: Situation, suspect: Suspect) -> list[int]:
    """Return the devices that a line is about: the worst, and those that it costs about as much."""
    if not suspect.devices:
        return []
    first = suspect.devices[0]
    saved = np.zeros(len(situation.recording.devices))
    for part in suspect.described:
        saved[list(part.devices)] += part.saved[:, part.devices].mean(axis=0)
    alike = [first, *(d for d in suspect.devices[1:] if saved[d] >= _NAMED * saved[first] > 0)]
    if suspect.fault.is_of_device:
        return alike
    devices = situation.recording.devices
    workers = {devices[d].worker for d in alike}
    return [d for d in suspect.devices if devices[d].worker in workers]


def listed(names: Sequence[str], what: str = "devices") -> str:
    """Return names, the first ones in full."""
    if len(names) > _MOST_NAMES + 1:
        return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} other {what}"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
