"""Devices that compute slowly, by the reason that readings give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from keras_het.planning.diagnosis.hosts import HostState
from keras_het.planning.diagnosis.recording import Floats
from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.suspect import Suspect
from keras_het.planning.diagnosis.what_if import fastest

# Balancing again is computed for so many devices that fail at once.
_MOST_BALANCED = 16


@dataclasses.dataclass(frozen=True)
class _Fault:
    """Why a device is slower than it should be, and the fraction of its time that it should take.

    Compared with what it was, not with other devices, if `since`.
    """

    kind: str
    why: str
    fraction: float
    since: bool
    worker: int | None = None
    advice: str = ""


def slow_devices(situation: Situation) -> Iterator[Suspect]:
    """Return the devices that compute more slowly than the fastest, or than they did before."""
    recent = situation.recent
    best = fastest(situation.lines, recent.shares)
    has_samples = (recent.shares > 0).any(axis=0) & recent.known
    left = _MOST_BALANCED
    for device in np.flatnonzero(has_samples).tolist():
        fault = _fault(situation, device)
        fraction = fault.fraction if fault else 1.0
        compute = recent.compute[:, device]
        line = situation.lines.seconds(recent.shares)[:, device]
        usual = np.minimum(compute, line * fraction) if fault else compute
        if fault:
            own = _saved(recent.own, device, np.maximum(compute - usual, 0.0))
            if situation.follows and left:
                left -= 1
                own = np.maximum(own, _saved_by_balance(situation, device, fraction))
            yield _suspect(fault, device, own)
        score = float(situation.best[device]) / max(fraction, 1e-9)
        if best is not None and score < 1.0 / situation.limits[device]:
            target = situation.lines.fixed[best] + situation.lines.slope[best] * recent.shares
            own = _saved(recent.own, device, np.maximum(usual - target[:, device], 0.0))
            others = _fast_ones(situation, device, best)
            why = f"computes {1 / score:.1f} times as long as {others} for the same samples"
            yield _suspect(_Fault("slow_device", why, score, False), device, own)


def _fault(situation: Situation, device: int) -> _Fault | None:
    """Return what is wrong with a device, beyond its model; None if nothing is."""
    limit = float(situation.limits[device])
    own = float(np.nan_to_num(situation.own_best[device], nan=1.0))
    worker = situation.recording.devices[device].worker
    on_gpu = situation.recording.devices[device].kind != "CPU"
    is_slow = situation.best[device] < 1.0 / limit
    was_faster = own < 1.0 / limit
    longer = f"computes {1 / max(own, 1e-9):.1f} times as long as in its own best steps"
    throttle = situation.readings.throttled(device, was_faster) if on_gpu else None
    if throttle and (was_faster or is_slow or throttle.certain):
        fraction = own if was_faster else throttle.fraction
        if np.isnan(fraction):
            fraction = float(situation.best[device])
        why = f"{throttle.why} and {longer}" if was_faster else throttle.why
        return _Fault("throttled_device", why, fraction, was_faster, advice=throttle.reason)
    host = situation.host(worker)
    if host and not on_gpu and host.stopped and not (was_faster or is_slow):
        return _Fault(host.kind, f"computes slowly: {host.why}", 1 - host.stopped, False, worker)
    scores = situation.own_best if was_faster else situation.best
    # A host that is only busy does not explain why another model of device is slow.
    may_be_host = host and (was_faster or (is_slow and (host.quota or not on_gpu)))
    if host and may_be_host and _explains(host, scores, device):
        fraction = float(scores[device])
        times = f"computes {1 / max(fraction, 1e-9):.1f} times as long as it should"
        return _Fault(host.kind, f"{times}: {host.why}", fraction, was_faster, worker)
    alone = own / situation.common
    if not alone < 1.0 / limit:
        return None
    other = situation.readings.other_program_on(device) if on_gpu else None
    if other:
        return _Fault("other_program", f"{longer}, and {other}", alone, True)
    return _Fault("slow_device", longer, alone, True)


def _explains(host: HostState, scores: Floats, device: int) -> bool:
    """Tell whether what is wrong with a device's host may be why its score is low.

    Not if the score of a device with the same trouble is much higher: what devices have in common
    makes no difference between them. Half of the loss, as a power, leaves room for luck.
    """
    others = host.alike.copy()
    others[device] = False
    return not (scores[others] > np.sqrt(scores[device])).any()


def _suspect(fault: _Fault, device: int, own: Floats) -> Suspect:
    return Suspect(
        fault.kind,
        (device,),
        own,
        np.zeros(len(own)),
        fault.why,
        fault.worker,
        fault.since,
        fault.advice,
    )


def _saved(like: Floats, device: int, seconds: Floats) -> Floats:
    own = np.zeros_like(like)
    own[:, device] = seconds
    return own


def _saved_by_balance(situation: Situation, device: int, fraction: float) -> Floats:
    """Return what all devices would save if shares followed the repair, as they have the fault."""
    factors = np.ones(len(situation.lines.fixed))
    factors[device] = fraction
    repaired = situation.balanced_seconds_with(factors)
    now = situation.balanced_seconds
    part = max(1.0 - repaired / now, 0.0) if now > 0 else 0.0
    return situation.recent.compute * part


def _fast_ones(situation: Situation, device: int, best: int) -> str:
    fast = np.nan_to_num(np.delete(situation.best, device), nan=1.0) > 0.9
    if fast.all():
        return "the others"
    return "most others" if fast.mean() > 0.5 else situation.recording.devices[best].name
