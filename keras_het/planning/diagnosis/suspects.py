"""What may have made steps longer: of each kind, what has become slow and what always was."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from keras_het.planning.diagnosis.readings import Fault
from keras_het.planning.diagnosis.recording import Floats
from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.statistics import best_block, means, medians
from keras_het.planning.diagnosis.steps import step_seconds

# Fraction of the step below which a phase is not looked at.
_LITTLE = 0.03
# Transfer up to this fraction of the other time of a step is taken for granted.
_USUAL_TRANSFER = 0.25
# Transfer of this many times the best one is a fault of the link.
_SLOWER_LINK = 1.5
_UNBALANCED = 1.1
# A phase is long on another worker, too, from this fraction of the time on.
_ALIKE = 0.5
# Balancing again is computed for so many devices that fail at once.
_MOST_BALANCED = 16
# Waits for input come in bursts, which must count; a single long step must not.
_MOST_MEDIANS_OF_OWN = 8.0
# What is no stall happens in most parts of so many steps.
_STEPS_OF_A_PART = 10


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A possible cause; without it steps have other `Steps.times`, lower ones by `saved`."""

    # Savings of several suspects add up; a time never falls below 0.

    fault: Fault
    devices: tuple[int, ...]
    saved: Floats
    phase: str = "compute"
    parts: tuple[Suspect, ...] = ()

    @staticmethod
    def joined(suspects: Sequence[Suspect]) -> Suspect:
        """Return suspects of a kind as one, described by the one that saves most."""
        parts = tuple(sorted(suspects, key=Suspect.size, reverse=True))
        devices = dict.fromkeys(device for part in parts for device in part.devices)
        saved = np.sum([part.saved for part in suspects], axis=0)
        return dataclasses.replace(parts[0], devices=tuple(devices), saved=saved, parts=parts)

    @property
    def described(self) -> tuple[Suspect, ...]:
        """Its parts that the text is about, such as the input of each worker."""
        return tuple(part for part in self.parts if part.phase == self.phase)

    @property
    def follows(self) -> bool:
        """Whether devices would save time because shares follow the repair of another one."""
        return bool(np.delete(self.saved[:, :-1], list(self.devices), axis=1).any())

    def size(self) -> float:
        """Return the largest mean saving of a device, or that of the transfer."""
        return float(self.saved.mean(axis=0).max())


def seconds_saved(
    situation: Situation, suspects: Iterable[Suspect], already: Iterable[Suspect] = ()
) -> Floats:
    """Return by how many seconds a step is shorter without some suspects, in three ways."""
    # The mean over steps; that between mean times, without waits because of noise; and the mean in
    # a usual part of the steps, without what happens in a few of them.
    before, after = (times_without(situation, each) for each in (already, suspects))
    by_step = step_seconds(before) - step_seconds(after)
    parts = np.array_split(by_step, max(len(by_step) // _STEPS_OF_A_PART, 1))
    usual = medians(np.array([part.mean() for part in parts]))
    by_mean = _of_mean_times(before) - _of_mean_times(after)
    return np.array([situation.recent.mean(by_step), by_mean, usual])


def _of_mean_times(times: Floats) -> float:
    own, transfer = times[:, :-1], times[:, -1]
    return float(means(own, _MOST_MEDIANS_OF_OWN).max() + transfer.mean())


def times_without(situation: Situation, suspects: Iterable[Suspect]) -> Floats:
    """Return what `Steps.times` would be without some suspects."""
    times = situation.recent.times
    for suspect in suspects:
        times = times - suspect.saved
    return np.maximum(times, 0.0)


def find_suspects(situation: Situation) -> list[Suspect]:
    """Return what may be causes, those of a kind as one."""
    found: dict[tuple[str, bool], list[Suspect]] = {}
    for look in (_slow_devices, _long_phases, _slow_link, _wrong_shares):
        for suspect in look(situation):
            found.setdefault((suspect.fault.kind, suspect.fault.since), []).append(suspect)
    return [Suspect.joined(each) for each in found.values()]


def _saving(situation: Situation, columns: int | list[int] | slice, seconds: Floats) -> Floats:
    """Return by how much `Steps.times` would be shorter, given that of some columns."""
    saved = np.zeros_like(situation.recent.times)
    saved[:, columns] = np.maximum(seconds, 0.0)
    return saved


def _slow_devices(situation: Situation) -> Iterator[Suspect]:
    """Devices that compute more slowly than the fastest, or than they did before."""
    recent, lines = situation.recent, situation.lines
    left = _MOST_BALANCED
    for device in np.flatnonzero((recent.shares > 0).any(axis=0) & recent.known).tolist():
        usual, fraction = recent.compute[:, device], 1.0
        fault = _fault(situation, device)
        if fault:
            fraction = fault.fraction
            line = lines.fixed[device] + lines.slope[device] * recent.shares[:, device]
            usual = np.minimum(usual, line * fraction)
            saved = _saving(situation, device, recent.compute[:, device] - usual)
            if situation.follows and left:
                left -= 1
                saved = np.maximum(saved, _saved_by_balance(situation, device, fraction))
            yield Suspect(fault, (device,), saved)
        score = float(situation.best[device]) / max(fraction, 1e-9)
        if score < 1.0 / situation.limits[device]:
            saved = _saving(situation, device, usual - situation.ideal_compute[:, device])
            why = f"is {1 / score:.1f} times slower per sample than {_fast_ones(situation, device)}"
            yield Suspect(Fault("slow_device", why), (device,), saved)


def _fault(situation: Situation, device: int) -> Fault | None:
    """Return why a device is slower than it was, or than its hardware is."""
    limit = float(situation.limits[device])
    best, own = float(situation.best[device]), float(situation.own_best[device])
    own = 1.0 if np.isnan(own) else own
    is_slow, was_faster = best < 1.0 / limit, own < 1.0 / limit
    on_gpu = situation.recording.devices[device].kind != "CPU"
    longer = f"is {1 / max(own, 1e-9):.1f} times slower than in its own best steps"
    throttle = situation.readings.throttled(device, is_slow, was_faster) if on_gpu else None
    if throttle and was_faster:
        why = f"{throttle.why} and {longer}"
        return dataclasses.replace(throttle, why=why, fraction=own, since=True)
    if throttle:
        fraction = best if np.isnan(throttle.fraction) else throttle.fraction
        return dataclasses.replace(throttle, fraction=fraction)
    seconds = float(situation.recent.compute[:, device].mean())
    lost = seconds * (1.0 - min(np.nan_to_num(best, nan=1.0), own))
    worker = situation.recording.devices[device].worker
    host = situation.lack_of_cpus(worker, seconds if on_gpu else 0.0, lost)
    if host and not on_gpu and host.fraction < 1.0 and not (was_faster or is_slow):
        return dataclasses.replace(host, why=f"computes slowly: {host.why}")
    scores = situation.own_best if was_faster else situation.best
    # A host that is only busy does not explain why another model of device is slow.
    may_be_host = was_faster or (is_slow and (not on_gpu or (host and host.remedy == "quota")))
    if host and may_be_host and _explains(host, scores, device):
        fraction = float(scores[device])
        why = f"is {1 / max(fraction, 1e-9):.1f} times slower than it should be: {host.why}"
        return dataclasses.replace(host, why=why, fraction=fraction, since=was_faster)
    alone = own / situation.common
    if not alone < 1.0 / limit:
        return None
    other = situation.readings.other_program_on(device) if on_gpu else ""
    if other:
        return Fault("other_program", f"{longer}, and {other}", alone, since=True)
    return Fault("slow_device", longer, alone, since=True)


def _explains(host: Fault, scores: Floats, device: int) -> bool:
    """Tell whether what is wrong with a device's host may be why its score is low."""
    # Not if the score of a device with the same trouble is much higher: what devices have in common
    # makes no difference between them. Half of the loss, as a power, leaves room for luck.
    return not (scores[host.others_alike(device)] > np.sqrt(scores[device])).any()


def _saved_by_balance(situation: Situation, device: int, fraction: float) -> Floats:
    """Return what all devices would save if shares followed the repair, as they have the fault."""
    factors = np.ones(len(situation.lines.fixed))
    factors[device] = fraction
    now = situation.balanced_seconds
    part = max(1.0 - situation.balanced_seconds_with(factors) / now, 0.0) if now > 0 else 0.0
    return _saving(situation, slice(0, -1), situation.recent.compute * part)


def _fast_ones(situation: Situation, device: int) -> str:
    fast = np.nan_to_num(np.delete(situation.best, device), nan=1.0) > 0.9
    if fast.all():
        return "the others"
    fastest = situation.recording.devices[int(np.nanargmax(situation.best))].name
    return "most others" if fast.mean() > 0.5 else fastest


def _long_phases(situation: Situation) -> Iterator[Suspect]:
    """Input and other time of each worker, beyond what they have to be."""
    recent = situation.recent
    least = np.nanmin([*best_block(situation.windows.earlier.other), recent.least_other])
    spends = "spends {:.3g} ms more than it must outside compute, input and exchange"
    phases = {
        "input": (recent.input, "waits {:.3g} ms for input in each step"),
        "other": (recent.other - least, spends),
    }
    for (worker, devices), (phase, (extra, why)) in itertools.product(
        situation.devices_of.items(), phases.items()
    ):
        saved = _saving(situation, devices, extra[:, devices])
        seconds = float(saved.mean(axis=0).max())
        if not seconds > _LITTLE * situation.step_seconds:
            continue
        fault = Fault(phase, why.format(seconds * 1e3), is_of_device=False)
        host = situation.lack_of_cpus(worker, seconds, seconds)
        # What hosts have in common does not explain why one worker loses more than the others.
        if host and (means(extra)[host.others_alike(devices)] > _ALIKE * seconds).all():
            fault = dataclasses.replace(host, why=f"{fault.why}: {host.why}")
        yield Suspect(fault, tuple(devices), saved, phase)


def _slow_link(situation: Situation) -> Iterator[Suspect]:
    """Transfer that is longer than before, or long beside everything else."""
    recent = situation.recent
    least = float(best_block(situation.windows.earlier.transfer[:, None])[0])
    if recent.own.shape[1] < 2:
        return
    seconds = float(recent.transfer.mean())
    usual = _USUAL_TRANSFER * float(recent.own.max(axis=1).mean())
    why = f"takes {seconds * 1e3:.3g} ms of each step"
    if seconds > _SLOWER_LINK * least:
        usual = min(usual, least)
        why += f", {min(seconds / max(least, 1e-9), 999):.1f} times slower than at its best"
    if seconds - usual <= _LITTLE * situation.step_seconds:
        return
    saved = _saving(situation, -1, recent.transfer - usual)
    # Which worker's link it is cannot be seen: who gets the sum late begins the next step late, and
    # the others wait for it there as long as it has waited here. But a quota slows an exchange.
    for worker, host in situation.hosts.items():
        if host and host.remedy == "quota":
            fault = dataclasses.replace(host, why=f"exchange {why}: {host.why}")
            yield Suspect(fault, tuple(situation.devices_of[worker]), saved, "sync")
            return
    yield Suspect(Fault("link", why), (), saved, "sync")


def _wrong_shares(situation: Situation) -> Iterator[Suspect]:
    """Devices that are last because they have more samples than their speed allows."""
    shares, now, best = situation.shares, situation.share_seconds, situation.balanced_seconds
    if situation.unbalanced <= _UNBALANCED:
        return
    last = now > _UNBALANCED * best
    many = shares > shares.mean() / np.nan_to_num(situation.best, nan=1.0) * _UNBALANCED
    for device in np.flatnonzero(last & many).tolist():
        seconds = situation.recent.compute[:, device] * (1.0 - best / now[device])
        factor = shares[device] / shares.mean()
        why = f"has {factor:.1f} times the samples of a mean share, more than its speed allows"
        yield Suspect(Fault("shares", why), (device,), _saving(situation, device, seconds))
