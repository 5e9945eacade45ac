"""What to do about each kind of cause."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.suspect import Suspect
from keras_het.planning.diagnosis.what_if import seconds_with_shares

_REMEDIES: Mapping[str, str] = {
    "its power limit": "Raise its power limit (nvidia-smi -pl) if its supply allows.{meanwhile}",
    "the power brake": "Check the power supply of its machine.{meanwhile}",
    "heat": "Improve its cooling.{meanwhile}",
    "throttled_device": "Check its cooling and its power limit.{meanwhile}",
    "other_program": "End the other program, or move worker {worker} elsewhere.{meanwhile}",
    "quota": "Raise the CPU quota of worker {worker}.{meanwhile}",
    "host": "Give worker {worker} more CPUs, or prepare its input elsewhere (data service).",
    "input": "Add LoaderTuner on worker {worker}.",
    "tuned_input": (
        "LoaderTuner is at work already: cache the data, store it nearer, or let other "
        "machines prepare it (data service)."
    ),
    "other": "Shorten what callbacks and Python do between the steps of worker {worker}.",
    "link": (
        "{find_the_link}"
        'Send gradients earlier (BucketTuner) or in fewer bytes (communication_dtype="bfloat16"), '
        'sum them on spare machines (gradient_reduction="summation"), exchange less often '
        "(LocalTraining), or use a faster link."
    ),
}
"""Remedies of kinds of causes, and closer ones that a suspect may name instead."""
_REMEDIES_OF_ALL: Mapping[str, str] = {
    "input": "Add LoaderTuner.",
    "other": (
        "Shorten what callbacks and Python do between the steps, or start several at once: "
        "compile(steps_per_execution=k)."
    ),
}
"""The same where all workers have the trouble."""
_FIND_THE_LINK = (
    "Times of steps cannot tell whose link is slow, because all workers wait for it alike: run "
    "`python -m keras_het doctor` on all of them, which measures each link. "
)
_WORTHWHILE = 1.05
# A worker that shortens balanced steps by less than this may as well train alone.
_LITTLE_HELP = 1.05
# In a large cluster no worker shortens steps much: it must also be far slower than the mean.
_SMALL_SHARE = 0.15


def advice_for(situation: Situation, suspect: Suspect, of_all: bool) -> str:
    """Return what to do about a cause, which may be one of all devices."""
    devices = situation.recording.devices
    worker = devices[suspect.devices[0]].worker if suspect.devices else None
    if worker is not None and suspect.fault.kind in ("slow_device", "shares"):
        return _balance(situation, worker, suspect.fault.since)
    name = suspect.fault.remedy if suspect.fault.remedy in _REMEDIES else suspect.fault.kind
    if name == "input" and situation.changed("loader"):
        name = "tuned_input"
    remedy = _REMEDIES_OF_ALL.get(name) if of_all else None
    return (remedy or _REMEDIES[name]).format(
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
