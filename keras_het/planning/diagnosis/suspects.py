"""What may have made steps longer, and the time that steps would save without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from keras_het.planning.diagnosis.recording import Floats
from keras_het.planning.diagnosis.situation import HostState, Situation
from keras_het.planning.diagnosis.steps import means, medians

# Fraction of the step below which a phase is not looked at.
_LITTLE = 0.03
# Transfer up to this fraction of the other time of a step is taken for granted.
_USUAL_TRANSFER = 0.25
# Transfer of this many times the best one is a fault of the link.
_SLOWER_LINK = 1.5
_UNBALANCED = 1.1
# A phase is long on another worker, too, from this fraction of the time on.
_ALIKE = 0.5
# Waits for input come in bursts, which must count; a single long step must not.
_MOST_MEDIANS_OF_OWN = 8.0
# What is no stall happens in most parts of so many steps.
_STEPS_OF_A_PART = 10
# Balancing again is computed for so many devices that fail at once.
_MOST_BALANCED = 16


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A possible cause, and the time that would be saved without it."""

    # Savings of several suspects add up; a time never falls below 0. What has become slow is
    # `since`. It is of a device if it is not of its whole worker. "host" is a lack of CPUs, "other"
    # the time of callbacks and Python.

    kind: str
    devices: tuple[int, ...]
    own: Floats
    why: str
    is_of_device: bool = True
    since: bool = False
    reason: str = ""
    phase: str = "compute"
    transfer: Floats | float = 0.0
    parts: tuple[Suspect, ...] = ()

    @staticmethod
    def joined(suspects: Sequence[Suspect]) -> Suspect:
        """Return suspects of a kind as one, described by the one that saves most."""
        first, *others = sorted(suspects, key=Suspect.size, reverse=True)
        if not others:
            return first
        devices = dict.fromkeys(device for each in (first, *others) for device in each.devices)
        return dataclasses.replace(
            first,
            devices=tuple(devices),
            own=np.sum([each.own for each in suspects], axis=0),
            transfer=sum(each.transfer for each in suspects),
            parts=(first, *others),
        )

    @property
    def told(self) -> tuple[Suspect, ...]:
        """Its parts that are of the kind that `why` tells of, such as the input of each worker."""
        return tuple(each for each in self.parts or (self,) if each.phase == self.phase)

    @property
    def follows(self) -> bool:
        """Whether devices would save time because shares follow the repair of another one."""
        others = np.ones(self.own.shape[1], np.bool_)
        others[list(self.devices)] = False
        return bool(self.own[:, others].any())

    def size(self) -> float:
        """Return the mean time that would be saved on the device with the largest saving."""
        return float(self.own.mean(axis=0).max(initial=0.0)) + float(np.mean(self.transfer))


def find_suspects(situation: Situation) -> list[Suspect]:
    """Return what may be causes: of each kind, what has become slow and what always was."""
    found: dict[tuple[str, bool], list[Suspect]] = {}
    for look in (_slow_devices, _long_phases, _slow_link, _wrong_shares):
        for suspect in look(situation):
            found.setdefault((suspect.kind, suspect.since), []).append(suspect)
    return [Suspect.joined(each) for each in found.values()]


def _slow_devices(situation: Situation) -> Iterator[Suspect]:
    """Devices that compute more slowly than the fastest, or than they did before."""
    recent, lines = situation.recent, situation.lines
    best = lines.fastest(recent.shares)
    left = _MOST_BALANCED
    for device in np.flatnonzero((recent.shares > 0).any(axis=0) & recent.known).tolist():
        usual, fraction = recent.compute[:, device], 1.0
        fault = _fault(situation, device)
        if fault:
            fraction = fault.fraction
            usual = np.minimum(usual, lines.seconds(recent.shares)[:, device] * fraction)
            own = _of_device(recent.own, device, recent.compute[:, device] - usual)
            if situation.follows and left:
                left -= 1
                own = np.maximum(own, _saved_by_balance(situation, device, fraction))
            what = (fault.why, fault.is_of_device, fault.since, fault.reason)
            yield Suspect(fault.kind, (device,), own, *what)
        score = float(situation.best[device]) / max(fraction, 1e-9)
        if best is not None and score < 1.0 / situation.limits[device]:
            target = lines.fixed[best] + lines.slope[best] * recent.shares
            own = _of_device(recent.own, device, usual - target[:, device])
            others = _fast_ones(situation, device, best)
            why = f"is {1 / score:.1f} times slower per sample than {others}"
            yield Suspect("slow_device", (device,), own, why)


@dataclasses.dataclass(frozen=True)
class _Fault:
    """Why a device is slower than others or than it was, and the part of its time that it needs."""

    kind: str
    why: str
    fraction: float
    since: bool
    is_of_device: bool = True
    reason: str = ""


def _fault(situation: Situation, device: int) -> _Fault | None:
    limit = float(situation.limits[device])
    best, own = float(situation.best[device]), float(situation.own_best[device])
    own = 1.0 if np.isnan(own) else own
    on_gpu = situation.recording.devices[device].kind != "CPU"
    seconds = float(situation.recent.compute[:, device].mean()) if on_gpu else 0.0
    host = situation.lack_of_cpus(situation.recording.devices[device].worker, seconds)
    is_slow, was_faster = best < 1.0 / limit, own < 1.0 / limit
    longer = f"is {1 / max(own, 1e-9):.1f} times slower than in its own best steps"
    throttle = situation.readings.throttled(device, was_faster) if on_gpu else None
    if throttle and (was_faster or is_slow or throttle.certain):
        fraction = own if was_faster else throttle.fraction
        fraction = best if np.isnan(fraction) else fraction
        why = f"{throttle.why} and {longer}" if was_faster else throttle.why
        return _Fault("throttled_device", why, fraction, was_faster, reason=throttle.reason)
    if host and not on_gpu and host.stopped and not (was_faster or is_slow):
        why = f"computes slowly: {host.why}"
        return _Fault(host.kind, why, 1 - host.stopped, since=False, is_of_device=False)
    scores = situation.own_best if was_faster else situation.best
    # A host that is only busy does not explain why another model of device is slow.
    may_be_host = host and (was_faster or (is_slow and (host.quota or not on_gpu)))
    if host and may_be_host and _explains(host, scores, device):
        fraction = float(scores[device])
        times = f"is {1 / max(fraction, 1e-9):.1f} times slower than it should be"
        why = f"{times}: {host.why}"
        return _Fault(host.kind, why, fraction, was_faster, is_of_device=False)
    alone = own / situation.common
    if not alone < 1.0 / limit:
        return None
    other = situation.readings.other_program_on(device) if on_gpu else None
    if other:
        return _Fault("other_program", f"{longer}, and {other}", alone, True)
    return _Fault("slow_device", longer, alone, True)


def _explains(host: HostState, scores: Floats, device: int) -> bool:
    """Tell whether what is wrong with a device's host may be why its score is low."""
    # Not if the score of a device with the same trouble is much higher: what devices have in common
    # makes no difference between them. Half of the loss, as a power, leaves room for luck.
    others = host.alike.copy()
    others[device] = False
    return not (scores[others] > np.sqrt(scores[device])).any()


def _of_device(like: Floats, device: int, seconds: Floats) -> Floats:
    own = np.zeros_like(like)
    own[:, device] = np.maximum(seconds, 0.0)
    return own


def _saved_by_balance(situation: Situation, device: int, fraction: float) -> Floats:
    """Return what all devices would save if shares followed the repair, as they have the fault."""
    factors = np.ones(len(situation.lines.fixed))
    factors[device] = fraction
    now = situation.balanced_seconds
    part = max(1.0 - situation.balanced_seconds_with(factors) / now, 0.0) if now > 0 else 0.0
    return situation.recent.compute * part


def _fast_ones(situation: Situation, device: int, best: int) -> str:
    fast = np.nan_to_num(np.delete(situation.best, device), nan=1.0) > 0.9
    if fast.all():
        return "the others"
    return "most others" if fast.mean() > 0.5 else situation.recording.devices[best].name


def _long_phases(situation: Situation) -> Iterator[Suspect]:
    """Input and other time of each worker, beyond what they have to be."""
    recent = situation.recent
    extra = recent.other - situation.least_other
    spends = "spends {:.3g} ms more than it must outside compute, input and exchange"
    for worker, devices in situation.devices_of.items():
        chosen = np.zeros(recent.own.shape[1], np.bool_)
        chosen[devices] = True
        for phase, everywhere, saved, why in (
            ("input", recent.input, recent.input, "waits {:.3g} ms for input in each step"),
            ("other", extra, np.maximum(extra, 0.0), spends),
        ):
            saved = np.where(chosen, saved, 0.0)
            seconds = float(means(saved)[devices].max(initial=0.0))
            if not seconds > _LITTLE * situation.step_seconds:
                continue
            kind, text = phase, why.format(seconds * 1e3)
            host = situation.lack_of_cpus(worker, seconds)
            # What hosts have in common does not explain why one worker loses more than the others.
            if host and np.all(means(everywhere)[host.alike & ~chosen] > _ALIKE * seconds):
                kind, text = host.kind, f"{text}: {host.why}"
            yield Suspect(kind, tuple(devices), saved, text, is_of_device=False, phase=phase)


def _slow_link(situation: Situation) -> Iterator[Suspect]:
    """Transfer that is longer than before, or long beside everything else."""
    recent = situation.recent
    if recent.own.shape[1] < 2:
        return
    seconds = float(recent.transfer.mean())
    usual = _USUAL_TRANSFER * float(recent.own.max(axis=1).mean())
    why = f"takes {seconds * 1e3:.3g} ms of each step"
    if seconds > _SLOWER_LINK * situation.least_transfer:
        usual = min(usual, situation.least_transfer)
        factor = seconds / max(situation.least_transfer, 1e-9)
        why = f"{why}, {min(factor, 999):.1f} times slower than at its best"
    if seconds - usual <= _LITTLE * situation.step_seconds:
        return
    saved = np.maximum(recent.transfer - usual, 0.0)
    # Which worker's link it is cannot be seen: who gets the sum late begins the next step late, and
    # the others wait for it there as long as it has waited here.
    link = Suspect("link", (), np.zeros_like(recent.own), why, phase="sync", transfer=saved)
    for worker, host in situation.hosts.items():
        if host and host.quota:
            devices = tuple(situation.devices_of[worker])
            why = f"exchange {why}: {host.why}"
            link = dataclasses.replace(
                link, kind=host.kind, devices=devices, why=why, is_of_device=False
            )
            break
    yield link


def _wrong_shares(situation: Situation) -> Iterator[Suspect]:
    """Devices that are last because they have more samples than their speed allows."""
    recent, shares = situation.recent, situation.shares
    best, now = situation.balanced_seconds, situation.share_seconds
    if situation.unbalanced <= _UNBALANCED:
        return
    last = now > _UNBALANCED * best
    many = shares > shares.mean() / np.nan_to_num(situation.best, nan=1.0) * _UNBALANCED
    for device in np.flatnonzero(last & many).tolist():
        seconds = recent.compute[:, device] * (1.0 - best / now[device])
        factor = shares[device] / shares.mean()
        why = f"has {factor:.1f} times the samples of a mean share, more than its speed allows"
        yield Suspect("shares", (device,), _of_device(recent.own, device, seconds), why)


def seconds_saved(
    situation: Situation, suspects: Sequence[Suspect], already: Sequence[Suspect] = ()
) -> Floats:
    """Return by how many seconds a step is shorter without some suspects, in three ways."""
    # The mean over steps; that between mean times, without waits because of noise; and the mean in
    # a usual part of the steps, without what happens in a few of them.
    (own, transfer), (own_then, transfer_then) = (
        repaired(situation, each) for each in (already, suspects)
    )
    by_step = own.max(axis=1) + transfer - own_then.max(axis=1) - transfer_then
    levels = (means(each, _MOST_MEDIANS_OF_OWN).max() for each in (own, own_then))
    by_mean = np.subtract(*levels) + (transfer - transfer_then).mean()
    parts = np.array_split(by_step, max(len(by_step) // _STEPS_OF_A_PART, 1))
    usual = medians(np.array([part.mean() for part in parts]))
    return np.array([situation.recent.mean(by_step), by_mean, usual])


def repaired(situation: Situation, suspects: Iterable[Suspect]) -> tuple[Floats, Floats]:
    """Return times before the collective [T, N], and of transfer [T], without some suspects."""
    own, transfer = situation.recent.own, situation.recent.transfer
    for suspect in suspects:
        own, transfer = own - suspect.own, transfer - suspect.transfer
    return np.maximum(own, 0.0), np.maximum(transfer, 0.0)
