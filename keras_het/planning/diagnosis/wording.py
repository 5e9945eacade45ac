"""The lines of a verdict: who, why with numbers, and what to do."""

from __future__ import annotations

import numpy as np

from keras_het.planning.diagnosis.middles import medians
from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.suspect import Suspect
from keras_het.planning.diagnosis.what_if import seconds_with_shares

# A device that saves less than half of what the worst one does is not named beside it.
_NAMED = 0.5
_MOST_NAMES = 2
_WORTHWHILE = 1.05
# A worker that shortens balanced steps by less than this may as well train alone.
_LITTLE_HELP = 1.05
# In a large cluster no worker shortens steps much: it must also be far slower than the mean.
_SMALL_SHARE = 0.15
_AGAINST_A_SLOW_LINK = (
    'Sum gradients on spare machines (aggregation="summation"), exchange less often '
    "(LocalTraining), or use a faster link."
)


def text_of(situation: Situation, suspect: Suspect, share_of_step: float) -> str:
    """Return who and why, in one sentence.

    Args:
        situation: what is known of recent steps.
        suspect: the cause.
        share_of_step: fraction of the step that it costs.
    """
    part = f"{share_of_step * 100:.0f} %"
    who = f"{_who(situation, suspect)}{_others(situation, suspect)}"
    since = situation.windows.since_speed
    began = f", since about step {since}" if suspect.since and since is not None else ""
    if suspect.kind == "link":
        return f"{who} {suspect.why}; that costs {part} of every step{began}."
    if suspect.kind == "slow_device" and not situation.changed("shares") and _waits(situation):
        return f"{who} {suspect.why}, and {part} of every step waits for it{began}."
    return f"{who} {suspect.why}, which costs {part} of every step{began}."


def advice_for(situation: Situation, suspect: Suspect) -> str:
    """Return what to do about a cause.

    Args:
        situation: what is known of recent steps.
        suspect: the cause.
    """
    worker = _worker(situation, suspect)
    if suspect.kind in ("slow_device", "shares"):
        return _balance(situation, suspect)
    if suspect.kind == "throttled_device":
        return f"{_against_throttling(suspect.advice)}{_meanwhile(situation)}"
    if suspect.kind == "input":
        if situation.changed("loader"):
            return (
                "LoaderTuner is at work already: cache the data, store it nearer, or let other "
                "machines prepare it (data service)."
            )
        return f"Add LoaderTuner on {worker}."
    if suspect.kind == "host":
        host = situation.host(suspect.worker) if suspect.worker is not None else None
        if host and host.quota:
            return f"Raise the CPU quota of {worker}.{_meanwhile(situation)}"
        return f"Give {worker} more CPUs, or prepare its input elsewhere (data service)."
    if suspect.kind == "other_program":
        return f"End the other program, or move {worker} elsewhere.{_meanwhile(situation)}"
    if suspect.kind == "link":
        return f"{_which_link(situation)}{_AGAINST_A_SLOW_LINK}"
    return f"Shorten what callbacks and Python do between the steps of {worker}."


def device_names(situation: Situation, devices: tuple[int, ...]) -> str:
    """Return names of devices, the first ones in full.

    Args:
        situation: what is known of recent steps.
        devices: their indices.
    """
    names = [situation.recording.devices[index].name for index in devices]
    return _list(names, "devices")


def _who(situation: Situation, suspect: Suspect) -> str:
    if suspect.kind == "link":
        return "The exchange of gradients"
    if suspect.worker is not None and suspect.kind != "shares":
        return f"worker {suspect.worker}"
    return situation.recording.devices[suspect.devices[0]].name


def _others(situation: Situation, suspect: Suspect) -> str:
    """Return the others that a cause concerns about as much."""
    if len(suspect.devices) < 2 or suspect.kind == "link":
        return ""
    saved = suspect.own.mean(axis=0)
    first = suspect.devices[0]
    alike = [d for d in suspect.devices[1:] if saved[d] >= _NAMED * saved[first] > 0]
    if suspect.worker is None or suspect.kind == "shares":
        names = [situation.recording.devices[device].name for device in alike]
        return f", like {_list(names, 'devices')}," if names else ""
    workers = sorted({situation.recording.devices[d].worker for d in alike} - {suspect.worker})
    names = [f"worker {worker}" for worker in workers]
    return f", like {_list(names, 'workers')}," if names else ""


def _list(names: list[str], what: str) -> str:
    if len(names) > _MOST_NAMES + 1:
        return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} other {what}"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _worker(situation: Situation, suspect: Suspect) -> str:
    if suspect.worker is not None:
        return f"worker {suspect.worker}"
    if suspect.devices:
        return f"worker {situation.recording.devices[suspect.devices[0]].worker}"
    return "the workers"


def _which_link(situation: Situation) -> str:
    """Return how to find the slow link: whoever is behind it, all workers wait for it alike."""
    if len(situation.workers) < 2:
        return ""
    return (
        "Times of steps cannot tell whose link is slow, because all workers wait for it alike: run "
        "`python -m keras_het doctor` on all of them, which measures each link. "
    )


def _waits(situation: Situation) -> bool:
    return len(situation.recording.devices) > 1


def _balance(situation: Situation, suspect: Suspect) -> str:
    worker = situation.recording.devices[suspect.devices[0]].worker
    if situation.changed("shares"):
        if not suspect.since and _helps_little(situation, worker):
            return _train_alone(worker)
        if suspect.kind == "shares":
            return "BatchBalancer changes shares already; see whether `max_share` keeps it from it."
        end = "Look at what has changed on its machine." if suspect.since else ""
        return f"Shares follow its speed already. {end}".strip()
    gain = _gain(situation)
    is_old = suspect.kind == "slow_device" and not suspect.since
    if is_old and _helps_little(situation, worker):
        return _train_alone(worker)
    if gain >= _WORTHWHILE:
        return f"Add BatchBalancer: predicted {gain:.1f} times the samples/s."
    now = situation.lines.seconds(medians(situation.recent.shares))
    compute_gain = float(np.nanmax(now)) / situation.balanced_seconds
    if compute_gain >= _WORTHWHILE:
        return (
            "Add BatchBalancer when the rest is mended: compute takes "
            f"{compute_gain:.1f} times as long as with balanced shares."
        )
    if suspect.since:
        return "Look at what has changed on its machine."
    return "Leave it out, or replace it: other shares would not help."


def _meanwhile(situation: Situation) -> str:
    if situation.changed("shares"):
        return " Shares follow already."
    gain = _gain(situation)
    if gain < _WORTHWHILE:
        return ""
    return f" Until then, BatchBalancer: predicted {gain:.1f} times the samples/s."


def _gain(situation: Situation) -> float:
    if len(situation.recording.devices) < 2:
        return 1.0
    shares = situation.lines.balanced(medians(situation.recent.shares))
    after = seconds_with_shares(situation.recent, situation.lines, shares.astype(np.float64))
    return situation.step_seconds / after if after > 0 else 1.0


def _helps_little(situation: Situation, worker: int) -> bool:
    """Tell whether balanced steps are about as short without a worker, because it is slow."""
    if len(situation.workers) < 2:
        return False
    devices = situation.devices_of(worker)
    shares = situation.lines.balanced(medians(situation.recent.shares))
    if shares[devices].mean() > _SMALL_SHARE * shares.mean():
        return False
    without = np.ones(len(situation.lines.fixed))
    without[devices] = 1e6  # so slow that it gets no samples
    seconds = situation.balanced_seconds_with(without)
    return bool(seconds <= _LITTLE_HELP * situation.balanced_seconds)


def _train_alone(worker: int) -> str:
    return (
        f"Let worker {worker} train asynchronously (HybridAggregation): with balanced shares, "
        "steps would be about as short without it."
    )


def _against_throttling(reason: str) -> str:
    if reason == "its power limit":
        return "Raise its power limit (nvidia-smi -pl) if its supply allows."
    if reason == "the power brake":
        return "Check the power supply of its machine."
    if reason == "heat":
        return "Improve its cooling."
    return "Check its cooling and its power limit."
