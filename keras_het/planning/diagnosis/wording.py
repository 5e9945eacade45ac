"""The lines of a verdict: who, why with numbers, and what to do."""

from __future__ import annotations

import dataclasses

import numpy as np

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
# Percentages that differ by less are shown as one.
_SAME = 0.03


@dataclasses.dataclass(frozen=True)
class Saving:
    """Fractions of a step that a repair would save."""

    alone: float
    of_all: float
    at_last: float
    follows: bool = False

    @property
    def most(self) -> float:
        """The largest of them."""
        return max(self.alone, self.of_all, self.at_last)


def text_of(situation: Situation, suspect: Suspect, saving: Saving) -> str:
    """Return who and why, in one sentence."""
    who = f"{_who(situation, suspect)}{_others(situation, suspect)}"
    others = "such devices" if _is_of_device(suspect) else "else of this cause"
    told = [(saving.alone, " with shares that follow" if saving.follows else "")]
    for share, condition in (
        (saving.of_all, f" with all {others}"),
        (saving.at_last, " once the other causes are mended"),
    ):
        if share > told[-1][0] + _SAME:
            told.append((share, condition))
    if len(told) > 1 and saving.alone < _SAME:
        del told[0]  # it hides behind the others
    (first, ends), *more = told
    part = f"{first * 100:.0f} % of every step"
    if more:
        ends += f" ({', '.join(f'{each * 100:.0f} %{when}' for each, when in more)})"
    since = situation.windows.since_speed
    if suspect.since and since is not None:
        ends += f", since about step {since}"
    if suspect.kind == "link":
        return f"{who} {suspect.why}; that costs {part}{ends}."
    if suspect.kind == "slow_device" and not saving.follows and len(situation.shares) > 1:
        return f"{who} {suspect.why}, and {part} waits for it{ends}."
    return f"{who} {suspect.why}, which costs {part}{ends}."


def advice_for(situation: Situation, suspect: Suspect) -> str:
    """Return what to do about a cause."""
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
    """Return names of devices, the first ones in full."""
    names = [situation.recording.devices[index].name for index in devices]
    return _list(names, "devices")


def _who(situation: Situation, suspect: Suspect) -> str:
    if suspect.kind == "link":
        return "The exchange of gradients"
    if suspect.worker is not None and suspect.kind != "shares":
        return f"worker {suspect.worker}"
    return situation.recording.devices[suspect.devices[0]].name


def named_devices(situation: Situation, suspect: Suspect) -> list[int]:
    """Return the devices that a line is about: the worst, and those that it costs about as much."""
    if not suspect.devices:
        return []
    first = suspect.devices[0]
    saved = np.zeros(suspect.own.shape[1])
    for part in suspect.told:
        saved[list(part.devices)] += part.own[:, part.devices].mean(axis=0)
    alike = [first, *(d for d in suspect.devices[1:] if saved[d] >= _NAMED * saved[first] > 0)]
    if _is_of_device(suspect):
        return alike
    workers = {suspect.worker, *(situation.recording.devices[d].worker for d in alike)}
    return [d for d in suspect.devices if situation.recording.devices[d].worker in workers]


def _is_of_device(suspect: Suspect) -> bool:
    return suspect.worker is None or suspect.kind == "shares"


def _others(situation: Situation, suspect: Suspect) -> str:
    """Return the others that a line is about."""
    devices = situation.recording.devices
    named = named_devices(situation, suspect)
    if _is_of_device(suspect):
        names, what = [devices[d].name for d in named[1:]], "devices"
    else:
        workers = sorted({devices[d].worker for d in named} - {suspect.worker})
        names, what = [f"worker {worker}" for worker in workers], "workers"
    return f", like {_list(names, what)}," if names else ""


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


def _balance(situation: Situation, suspect: Suspect) -> str:
    worker = situation.recording.devices[suspect.devices[0]].worker
    if not suspect.since and _helps_little(situation, worker):
        return _train_alone(worker)
    if situation.is_balanced:
        if suspect.since:
            rest = "Look at what has changed on its machine."
        else:
            rest = "Leave it out, or replace it: other shares would not help."
        return f"Shares follow its speed already. {rest}" if situation.follows else rest
    what = "Add BatchBalancer"
    if situation.changed("shares"):
        what = (
            'Shares do not follow its speed. BatchBalancer\'s policy "boa" makes them, where no '
            "`max_share` is in the way"
        )
    gain = _gain(situation)
    brings = f"predicted {gain:.1f} times the samples/s"
    if gain < _WORTHWHILE:
        brings = (
            f"compute takes {situation.unbalanced:.1f} times as long as with balanced shares, "
            "which counts once the rest is mended"
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
    if len(situation.workers) < 2:
        return False
    devices = situation.devices_of(worker)
    shares = situation.lines.balanced(situation.shares)
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
