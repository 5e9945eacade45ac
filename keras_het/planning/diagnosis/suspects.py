"""What may have made steps longer, and the time that steps would save without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from keras_het.planning.diagnosis.middles import means, medians
from keras_het.planning.diagnosis.recording import Floats
from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.slow_devices import slow_devices
from keras_het.planning.diagnosis.suspect import Suspect

# Fraction of the step below which a phase is not looked at.
_LITTLE = 0.03
USUAL_TRANSFER = 0.25
"""Transfer up to this fraction of the other time of a step is taken for granted."""
# Transfer of this many times the best one is a fault of the link.
_SLOWER_LINK = 1.5
_UNBALANCED = 1.1
# A phase is long on another worker, too, from this fraction of the time on.
_ALIKE = 0.5
# Waits for input come in bursts, which must count; a single long step must not.
_MOST_MEDIANS_OF_OWN = 8.0
# What is no stall happens in most parts of so many steps.
_STEPS_OF_A_PART = 10


def find_suspects(situation: Situation) -> list[Suspect]:
    """Return everything that may be a cause, one for each kind, with all devices concerned.

    What has become slow is one, and what was always slow another.
    """
    found: dict[tuple[str, bool], list[Suspect]] = {}
    for suspect in _all_suspects(situation):
        found.setdefault((suspect.kind, suspect.since), []).append(suspect)
    return [Suspect.joined(each) for each in found.values()]


def _all_suspects(situation: Situation) -> Iterator[Suspect]:
    yield from slow_devices(situation)
    for worker in situation.workers:
        yield from _phases(situation, worker)
    yield from _link(situation)
    yield from _shares(situation)


def _phases(situation: Situation, worker: int) -> Iterable[Suspect]:
    """Input and other time of a worker, beyond what they have to be."""
    recent, devices = situation.recent, situation.devices_of(worker)
    chosen = np.zeros(recent.own.shape[1], np.bool_)
    chosen[devices] = True
    least = _LITTLE * situation.step_seconds
    waited = np.where(chosen, recent.input, 0.0)
    extra = np.where(chosen, np.maximum(recent.other - situation.least_other, 0.0), 0.0)
    for phase, saved, why in (
        ("input", waited, "waits {:.3g} ms for input in each step"),
        ("other", extra, "spends {:.3g} ms more than it must outside compute, input and exchange"),
    ):
        seconds = float(means(saved)[devices].max(initial=0.0))
        if seconds > least:
            host = situation.host(worker)
            text = why.format(seconds * 1e3)
            everywhere = recent.input if phase == "input" else recent.other - situation.least_other
            # What hosts have in common does not explain why one worker loses more than the others.
            alike = means(everywhere)[host.alike & ~chosen] if host else np.zeros(0)
            kind = phase
            if host and np.all(alike > _ALIKE * seconds):
                kind, text = host.kind, f"{text}: {host.why}"
            nothing = np.zeros(len(saved))
            yield Suspect(kind, tuple(devices), saved, nothing, text, worker, phase=phase)


def _link(situation: Situation) -> Iterable[Suspect]:
    """Transfer that is longer than before, or long beside everything else."""
    recent = situation.recent
    if recent.own.shape[1] < 2:
        return
    seconds = float(recent.transfer.mean())
    rest = float(recent.own.max(axis=1).mean())
    usual, why = USUAL_TRANSFER * rest, f"takes {seconds * 1e3:.3g} ms of each step"
    if seconds > _SLOWER_LINK * situation.least_transfer:
        usual = min(usual, situation.least_transfer)
        factor = seconds / max(situation.least_transfer, 1e-9)
        why = f"{why}, {min(factor, 999):.1f} times as long as at its best"
    if seconds - usual <= _LITTLE * situation.step_seconds:
        return
    saved = np.maximum(recent.transfer - usual, 0.0)
    nothing = np.zeros_like(recent.own)
    for worker in situation.workers:
        host = situation.host(worker)
        if host and host.quota:
            devices = tuple(situation.devices_of(worker))
            text = f"exchange {why}: {host.why}"
            yield Suspect(host.kind, devices, nothing, saved, text, worker, phase="sync")
            return
    # Which worker's link it is cannot be seen: who gets the sum late begins the next step late, and
    # the others wait for it there as long as it has waited here.
    yield Suspect("link", (), nothing, saved, why, phase="sync")


def _shares(situation: Situation) -> Iterable[Suspect]:
    """Devices that are last because they have more samples than their speed allows."""
    recent, shares = situation.recent, situation.shares
    best, now = situation.balanced_seconds, situation.share_seconds
    if situation.unbalanced <= _UNBALANCED:
        return
    last = now > _UNBALANCED * best
    many = shares > shares.mean() / np.nan_to_num(situation.best, nan=1.0) * _UNBALANCED
    chosen = np.flatnonzero(last & many)
    for device in chosen.tolist():
        saved: Floats = np.zeros_like(recent.own)
        saved[:, device] = recent.compute[:, device] * (1.0 - best / now[device])
        factor = shares[device] / shares.mean()
        why = f"has {factor:.1f} times the samples of a mean share, more than its speed allows"
        worker = situation.recording.devices[device].worker
        yield Suspect("shares", (device,), saved, np.zeros(len(saved)), why, worker)


def seconds_saved(
    situation: Situation, suspects: Sequence[Suspect], already: Sequence[Suspect] = ()
) -> Floats:
    """Return by how many seconds a step is shorter without some suspects, in three ways.

    The mean over steps, which has what devices wait for each other because of noise; that between
    mean times, which has not; and the mean in a usual part of these steps, which has no part of
    what happens in a few of them, however long it takes.
    """
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
