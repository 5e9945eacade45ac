"""The lines of a verdict: who, why with numbers, and what to do, by kind of cause."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.suspects import Suspect
from keras_het.planning.diagnosis.what_if import seconds_with_shares

LOOKS_LIKE = {"slow_device": "a slow device", "input": "a slow pipeline", "other": "slow callbacks"}
"""What a lack of CPUs looks like without readings."""
# A device that saves less than half of what the worst one does is not named beside it.
_NAMED = 0.5
_MOST_NAMES = 2
_WORTHWHILE = 1.05
# A worker that shortens balanced steps by less than this may as well train alone.
_LITTLE_HELP = 1.05
# In a large cluster no worker shortens steps much: it must also be far slower than the mean.
_SMALL_SHARE = 0.15
# Percentages that differ by less are shown as one.
_SAME = 0.03
_UNTHROTTLE = {
    "its power limit": "Raise its power limit (nvidia-smi -pl) if its supply allows.",
    "the power brake": "Check the power supply of its machine.",
    "heat": "Improve its cooling.",
}
_MEND_THE_LINK = (
    'Send gradients earlier (BucketTuner) or in fewer bytes (communication_dtype="bfloat16"), sum '
    'them on spare machines (gradient_reduction="summation"), exchange less often '
    "(LocalTraining), or use a faster link."
)
_FIND_THE_LINK = (
    "Times of steps cannot tell whose link is slow, because all workers wait for it alike: run "
    "`python -m keras_het doctor` on all of them, which measures each link. "
)


def advice_for(situation: Situation, suspect: Suspect) -> str:
    """Return what to do about a cause."""
    if suspect.kind == "link":
        return (_FIND_THE_LINK if len(situation.hosts) > 1 else "") + _MEND_THE_LINK
    worker = situation.recording.devices[suspect.devices[0]].worker
    host = situation.hosts[worker]
    is_everywhere = len(named_devices(situation, suspect)) == len(situation.recording.devices)
    match suspect.kind:
        case "slow_device" | "shares":
            return _balance(situation, worker, suspect.since)
        case "throttled_device":
            advice = _UNTHROTTLE.get(suspect.reason, "Check its cooling and its power limit.")
            return advice + _meanwhile(situation)
        case "other_program":
            rest = _meanwhile(situation)
            return f"End the other program, or move worker {worker} elsewhere.{rest}"
        case "host" if host and host.quota:
            return f"Raise the CPU quota of worker {worker}.{_meanwhile(situation)}"
        case "host":
            return f"Give worker {worker} more CPUs, or prepare its input elsewhere (data service)."
        case "input" if situation.changed("loader"):
            return (
                "LoaderTuner is at work already: cache the data, store it nearer, or let other "
                "machines prepare it (data service)."
            )
        case "input":
            return "Add LoaderTuner" + ("." if is_everywhere else f" on worker {worker}.")
    if is_everywhere:
        return (
            "Shorten what callbacks and Python do between the steps, or start several at once: "
            "compile(steps_per_execution=k)."
        )
    return f"Shorten what callbacks and Python do between the steps of worker {worker}."


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
    best = situation.lines.balanced(situation.shares)
    # of each step's own global batch, which may grow
    total = situation.recent.shares.sum(axis=1, keepdims=True)
    shares = best / max(int(best.sum()), 1) * total
    after = seconds_with_shares(situation.recent, situation.lines, shares)
    return situation.step_seconds / after if after > 0 else 1.0


def _helps_little(situation: Situation, worker: int) -> bool:
    """Tell whether balanced steps are about as short without a worker, because it is slow."""
    if len(situation.hosts) < 2:
        return False
    devices = situation.devices_of[worker]
    shares = situation.lines.balanced(situation.shares)
    if shares[devices].mean() > _SMALL_SHARE * shares.mean():
        return False
    without = np.ones(len(situation.lines.fixed))
    without[devices] = 1e6  # so slow that it gets no samples
    seconds = situation.balanced_seconds_with(without)
    return bool(seconds <= _LITTLE_HELP * situation.balanced_seconds)


def text_of(situation: Situation, suspect: Suspect, alone: float, all_: float, last: float) -> str:
    """Return who and why, with the fractions of a step that the repair would save."""
    # Of the devices that are named, of all, and of all once the other causes are fixed.
    who = f"{_who(situation, suspect)} {suspect.why}"
    others = "such devices" if suspect.is_of_device else "else of this cause"
    told = [(alone, " with shares that follow" if suspect.follows else "")]
    for saved, condition in (
        (all_, f" with all {others}"),
        (last, " once the other causes are fixed"),
    ):
        if saved > told[-1][0] + _SAME:
            told.append((saved, condition))
    if len(told) > 1 and alone < _SAME:
        del told[0]  # it hides behind the others
    (first, ends), *more = told
    part = f"{first * 100:.0f} % of every step"
    if more:
        ends += f" ({', '.join(f'{each * 100:.0f} %{when}' for each, when in more)})"
    since = situation.windows.since_speed
    if suspect.since and since is not None:
        ends += f", since about step {since}"
    if suspect.kind == "link":
        return f"{who}; that costs {part}{ends}."
    if suspect.kind == "slow_device" and not suspect.follows and len(situation.shares) > 1:
        return f"{who}, and {part} waits for it{ends}."
    return f"{who}, which costs {part}{ends}."


def _who(situation: Situation, suspect: Suspect) -> str:
    if suspect.kind == "link":
        return "The exchange of gradients"
    devices = [situation.recording.devices[d] for d in named_devices(situation, suspect)]
    if suspect.is_of_device:
        others, what = [device.name for device in devices[1:]], "devices"
        first = devices[0].name
    else:
        workers = sorted({device.worker for device in devices} - {devices[0].worker})
        others, what = [f"worker {worker}" for worker in workers], "workers"
        first = f"worker {devices[0].worker}"
    return f"{first}, like {listed(others, what)}," if others else first


def named_devices(situation: Situation, suspect: Suspect) -> list[int]:
    """Return the devices that a line is about: the worst, and those that it costs about as much."""
    if not suspect.devices:
        return []
    first = suspect.devices[0]
    saved = np.zeros(suspect.own.shape[1])
    for part in suspect.told:
        saved[list(part.devices)] += part.own[:, part.devices].mean(axis=0)
    alike = [first, *(d for d in suspect.devices[1:] if saved[d] >= _NAMED * saved[first] > 0)]
    if suspect.is_of_device:
        return alike
    devices = situation.recording.devices
    workers = {devices[d].worker for d in alike}
    return [d for d in suspect.devices if devices[d].worker in workers]


def listed(names: Sequence[str], what: str = "devices") -> str:
    """Return names, the first ones in full."""
    if len(names) > _MOST_NAMES + 1:
        return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} other {what}"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
