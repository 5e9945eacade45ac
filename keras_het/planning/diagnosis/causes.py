"""What a verdict says of a cause: who, why with numbers, what it costs, and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.suspects import Suspect, seconds_saved
from keras_het.planning.diagnosis.what_if import seconds_with_shares

SILENT = 0.1
"""Fraction of a step below which a cause is not named."""
# A device that saves less than half of what the worst one does is not named beside it.
_NAMED = 0.5
_MOST_NAMES = 2
# Percentages that differ by less are shown as one.
_SAME = 0.03
_REMEDIES: Mapping[str, str] = {
    "its power limit": "Raise its power limit (nvidia-smi -pl) if its supply allows.{meanwhile}",
    "the power brake": "Check the power supply of its machine.{meanwhile}",
    "heat": "Improve its cooling.{meanwhile}",
    "throttled_device": "Check its cooling and its power limit.{meanwhile}",
    "other_program": "End the other program, or move worker {worker} elsewhere.{meanwhile}",
    "quota": "Raise the CPU quota of worker {worker}.{meanwhile}",
    "host": "Give worker {worker} more CPUs, or prepare its input elsewhere (data service).",
    "input": "Add LoaderTuner on worker {worker}.",
    "input of all": "Add LoaderTuner.",
    "tuned_input": (
        "LoaderTuner is at work already: cache the data, store it nearer, or let other "
        "machines prepare it (data service)."
    ),
    "other": "Shorten what callbacks and Python do between the steps of worker {worker}.",
    "other of all": (
        "Shorten what callbacks and Python do between the steps, or start several at once: "
        "compile(steps_per_execution=k)."
    ),
    "link": (
        "{find_the_link}"
        'Send gradients earlier (BucketTuner) or in fewer bytes (communication_dtype="bfloat16"), '
        'sum them on spare machines (gradient_reduction="summation"), exchange less often '
        "(LocalTraining), or use a faster link."
    ),
}
"""Remedies of kinds of causes, closer ones that a suspect names, and those where all have it."""
_FIND_THE_LINK = (
    "Times of steps cannot tell whose link is slow, because all workers wait for it alike: run "
    "`python -m keras_het doctor` on all of them, which measures each link. "
)
_WORTHWHILE = 1.05
# A worker that shortens balanced steps by less than this may as well train alone.
_LITTLE_HELP = 1.05
# In a large cluster no worker shortens steps much: it must also be far slower than the mean.
_SMALL_SHARE = 0.15


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
        _advice_for(situation, suspect, of_all=len(named) == len(devices)),
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


def _advice_for(situation: Situation, suspect: Suspect, of_all: bool) -> str:
    """Return what to do about a cause, which may be one of all devices."""
    devices = situation.recording.devices
    worker = devices[suspect.devices[0]].worker if suspect.devices else None
    if worker is not None and suspect.fault.kind in ("slow_device", "shares"):
        return _balance(situation, worker, suspect.fault.since)
    name = suspect.fault.remedy if suspect.fault.remedy in _REMEDIES else suspect.fault.kind
    if name == "input" and situation.changed("loader"):
        name = "tuned_input"
    if of_all and f"{name} of all" in _REMEDIES:
        name = f"{name} of all"
    return _REMEDIES[name].format(
        worker=worker,
        meanwhile=_meanwhile(situation),
        find_the_link=_FIND_THE_LINK if len(situation.devices_of) > 1 else "",
    )


def _balance(situation: Situation, worker: int, since: bool) -> str:
    if not since and _helps_little(situation, worker):
        return (
            f"Let worker {worker} train asynchronously (AsyncWorkers): with balanced shares, "
            "steps would be about as short without it."
        )
    if situation.is_balanced:
        rest = "Leave it out, or replace it: other shares would not help."
        if since:
            rest = "Check what has changed on its machine."
        return f"Shares follow its speed already. {rest}" if situation.follows else rest
    what = "Add BatchBalancer"
    if situation.changed("shares"):
        what = (
            'Shares do not follow its speed. BatchBalancer\'s policy "min_max" makes them, where '
            "no `max_share` is in the way"
        )
    gain = _gain(situation)
    brings = f"predicted {gain:.1f} times the samples/s"
    if gain < _WORTHWHILE:
        brings = (
            f"compute takes {situation.unbalanced:.1f} times as long as with balanced shares, "
            "which counts once the rest is fixed"
        )
    return f"{what}: {brings}."


def _meanwhile(situation: Situation) -> str:
    if situation.follows:
        return " Shares follow already."
    gain = _gain(situation)
    if gain < _WORTHWHILE:
        return ""
    return f" Until then, BatchBalancer: predicted {gain:.1f} times the samples/s."


def _gain(situation: Situation) -> float:
    if len(situation.recording.devices) < 2:
        return 1.0
    after = seconds_with_shares(situation, situation.lines.balanced(situation.shares))
    return situation.step_seconds / after if after > 0 else 1.0


def _helps_little(situation: Situation, worker: int) -> bool:
    """Tell whether balanced steps are about as short without a worker, because it is slow."""
    if len(situation.devices_of) < 2:
        return False
    devices = situation.devices_of[worker]
    shares = situation.lines.balanced(situation.shares)
    if shares[devices].mean() > _SMALL_SHARE * shares.mean():
        return False
    without = np.ones(len(situation.lines.fixed))
    without[devices] = 1e6  # so slow that it gets no samples
    seconds = situation.balanced_seconds_with(without)
    return bool(seconds <= _LITTLE_HELP * situation.balanced_seconds)
