"""Why steps are longer than they have to be, in at most three lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_het.planning.diagnosis.causes import SILENT, Cause, cause_of, fraction_of_step, listed
from keras_het.planning.diagnosis.recording import Floats, Recording
from keras_het.planning.diagnosis.situation import Situation
from keras_het.planning.diagnosis.stages import of_stages
from keras_het.planning.diagnosis.statistics import blocks, medians
from keras_het.planning.diagnosis.steps import step_seconds
from keras_het.planning.diagnosis.suspects import (
    Suspect,
    find_suspects,
    seconds_saved,
    times_without,
)
from keras_het.planning.diagnosis.what_if import PHASE_REPAIRS, what_if
from keras_het.planning.diagnosis.windows import MIN_STEPS

LEAST = 0.03
"""Fraction of a step below which a cause is not named along with others."""
_TOGETHER = 0.15
"""Fraction of a usual step that causes must cost together if none costs `SILENT` in most of the
time: stalls do not count, nor does each phase taking a bit longer beside other programs."""
EXPLAINED = 0.8
"""Fraction of the excess that the causes explain together, or the verdict says what is left."""
MOSTLY = 0.5
"""Fraction of the excess that the causes must explain together, or none is named."""
MOST_LINES = 3
# A step this many times as long as in the best earlier steps is too long even without a suspect.
_LONGER_THAN_BEST = 1.25
# Batches that differ by less are compared.
_SAME_BATCH = 0.02
# The best of many is better than any is expected to be.
_NOT_LUCK = 1.05
# Score of the best device against itself below which all are slower.
_ALL_SLOWER = 0.85
# What a lack of CPUs looks like without readings.
_LOOKS_LIKE = {
    "slow_device": "a slow device",
    "input": "a slow pipeline",
    "other": "slow callbacks",
}


@dataclasses.dataclass(frozen=True, repr=False)
class Verdict:
    """The result of a diagnosis."""

    lines: tuple[str, ...]
    causes: tuple[Cause, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines or [f"No verdict: {reason}." for reason in self.missing])

    __repr__ = __str__  # what a notebook shows


def diagnose(recording: Recording) -> Verdict:
    """Say what makes recent steps longer than they have to be."""
    with np.errstate(all="ignore"):
        situation = Situation(recording)
        abstention = _abstention(situation)
        if abstention:
            return Verdict((), (), (abstention,))
        if recording.pipeline is not None:
            return Verdict(*of_stages(situation, recording.pipeline), ())
        return _of_replicas(situation)


def _abstention(situation: Situation) -> str:
    recording, windows = situation.recording, situation.windows
    if not recording.devices:
        return "no devices"
    if windows.wanted >= MIN_STEPS and windows.recent.own.max(initial=0.0) > 0:
        return ""
    if not np.isfinite(recording.compute).any() and len(recording.steps) >= MIN_STEPS:
        return "no compute times: cannot tell devices apart"
    number = f"{windows.wanted} of {MIN_STEPS}"
    is_sampled = recording.measured is not None and not recording.measured.all()
    steps = "measured steps" if is_sampled else "steps"
    if windows.since_shares is not None:
        return f"not enough {steps} since shares changed in step {windows.since_shares}: {number}"
    return f"not enough {steps} yet: {number}"


def _of_replicas(situation: Situation) -> Verdict:
    # With all suspects S repaired, the recorded steps take T(S); one costs T(S without it) - T(S),
    # over the step's time. Those that cost little are left out, unless the others explain too
    # little of the excess: of the step's time over T(S), and over the best earlier steps.
    suspects = find_suspects(situation)
    costs, is_lasting = _costs(situation, suspects)
    ranked = sorted(zip(suspects, costs, strict=True), key=lambda each: -each[1])
    named = [suspect for suspect, cost in ranked if is_lasting and cost >= SILENT]
    gap = _gap(situation, suspects, named)
    # What is left may be several causes that cost less than that each.
    for suspect, cost in ranked[len(named) :]:
        if gap and cost >= LEAST:
            named.append(suspect)
            gap = _gap(situation, suspects, named)
    missing = _missing(situation, named)
    if gap:
        explained, excess = gap
        missing.append(_unexplained(situation, explained, excess))
        if explained < MOSTLY * excess or not is_lasting:
            return Verdict((), (), tuple(missing))
    elif not is_lasting:
        times, without = situation.recent.times, times_without(situation, named)
        saved = _usual_seconds(times[None]) - _usual_seconds(without[None])
        if saved / situation.step_seconds < _TOGETHER:
            named = []
    causes = tuple(cause_of(situation, *each) for each in ranked[: len(named)])
    lines = [f"{cause.text} {cause.advice}" for cause in causes[:MOST_LINES]]
    if gap:
        lines = [*lines[: MOST_LINES - 1], f"There is more: {missing[-1]}."]
    if not lines:
        lines.append(_nothing_to_do(situation))
    return Verdict(tuple(lines), causes, tuple(missing))


def _costs(situation: Situation, suspects: Sequence[Suspect]) -> tuple[list[float], bool]:
    """Return the fraction of the step that each costs, and if one does so in most of the time."""
    # Noise makes devices wait for each other, too: the smaller of two costs counts.
    costs, is_lasting = [], False
    for index in range(len(suspects)):
        others = [*suspects[:index], *suspects[index + 1 :]]
        saved = seconds_saved(situation, suspects, others)
        costs.append(fraction_of_step(situation, saved[:2].min()))
        is_lasting |= bool(saved.min() / situation.step_seconds >= SILENT)
    return costs, is_lasting


def _gap(
    situation: Situation, suspects: Sequence[Suspect], named: Sequence[Suspect]
) -> tuple[float, float] | None:
    """Return how many seconds too many of a step causes explain, of how many; None if enough."""
    recent, earlier = situation.recent, situation.windows.earlier
    of_all, of_named = (seconds_saved(situation, each) for each in (suspects, named))
    least = int(of_all.argmin())
    gaps = [(float(of_named[least]), float(of_all[least]))]
    samples = float(medians(recent.shares.sum(axis=1)))
    as_many = np.abs(earlier.shares.sum(axis=1) - samples) <= _SAME_BATCH * samples
    best, now = _usual_seconds(blocks(earlier.times[as_many])), _usual_seconds(recent.times[None])
    if now > _LONGER_THAN_BEST * best:
        # Suspects may explain this and yet cost little, where noise makes steps as long.
        gaps.append((float(of_all[1]), now - _NOT_LUCK * best))
    large = [
        (explained, excess)
        for explained, excess in gaps
        if excess >= SILENT * situation.step_seconds and explained < EXPLAINED * excess
    ]
    return min(large, key=lambda gap: gap[0] / gap[1], default=None)


def _usual_seconds(times: Floats) -> float:
    """Return the shortest usual step of blocks of `Steps.times`: of medians over their rows."""
    return float(step_seconds(medians(times, axis=1)).min(initial=np.inf))


def _unexplained(situation: Situation, explained: float, excess: float) -> str:
    found = (
        f"{excess * 1e3:.3g} ms of each step are more than necessary, and what is known "
        f"explains {max(explained, 0.0) * 1e3:.3g} ms"
    )
    if situation.common < _ALL_SLOWER:
        return (
            f"{found}: all devices are {1 / situation.common:.1f} times slower than in their "
            "own best steps; samples may have become larger"
        )
    return found


def _nothing_to_do(situation: Situation) -> str:
    """Say that no cause is named, without contradicting a table that shows something to save."""
    result = what_if(situation)
    names = [device.name for device in situation.recording.devices]
    repairs = {
        **{PHASE_REPAIRS[phase]: seconds for phase, seconds in result.by_phase.items()},
        **{f"worker {worker} not slow": s for worker, s in result.by_worker.items()},
        **{f"{name} not slow": s for name, s in zip(names, result.by_device, strict=True)},
    }
    best = min(repairs, key=lambda name: repairs[name])
    most = 1.0 - repairs[best] / result.step_seconds
    if most < SILENT - 0.005:  # as it is shown
        return f"No bottleneck found: nothing costs more than {SILENT * 100:.0f} % of a step."
    why = "is usual" if best == PHASE_REPAIRS["sync"] else "cannot be told from noise"
    return f"No cause stands out: {best} would save {most * 100:.0f} % of a step, which {why}."


def _missing(situation: Situation, named: Sequence[Suspect]) -> list[str]:
    """Return what would have told causes apart that look alike without it."""
    devices, readings = situation.recording.devices, situation.readings
    missing = []
    if len(unknown := np.flatnonzero(~situation.recent.known)):
        missing.append(f"no compute times of {listed([devices[index].name for index in unknown])}")
    for suspect in named:
        looks_like = _LOOKS_LIKE.get(suspect.fault.kind)
        if looks_like is None:
            continue
        first, is_slow = devices[suspect.devices[0]], suspect.fault.kind == "slow_device"
        host = situation.hosts[first.worker]
        if is_slow and first.kind != "CPU":
            if not readings.knows_clock(suspect.devices[0]):
                missing.append(
                    f"no clock readings of {first.name}: cannot tell a throttled device from a "
                    "slow one"
                )
        elif not readings.knows_host(first.worker):
            missing.append(
                f"no CPU readings of worker {first.worker}: cannot tell a lack of CPUs from "
                f"{looks_like}"
            )
        elif is_slow and host and host.kind == "other_program":
            missing.append(
                "no readings of single CPUs: cannot tell whether other programs take more from "
                f"worker {first.worker} than from those that have as little left"
            )
    return missing
