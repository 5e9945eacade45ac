"""Why steps are longer than they have to be, in at most three lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_het.planning.diagnosis.causes import (
    LOOKS_LIKE,
    advice_for,
    listed,
    named_devices,
    text_of,
)
from keras_het.planning.diagnosis.recording import Floats, PipelineRecord, Recording
from keras_het.planning.diagnosis.situation import Situation, usual_seconds
from keras_het.planning.diagnosis.steps import MIN_STEPS, Windows, choose_windows, means
from keras_het.planning.diagnosis.suspects import Suspect, find_suspects, repaired, seconds_saved
from keras_het.planning.diagnosis.what_if import PHASE_REPAIRS, WINDOW, what_if

SILENT = 0.1
"""Fraction of a step below which a cause is not named."""
LEAST = 0.03
"""The same for a cause that is named along with others."""
_TOGETHER = 0.15
"""Fraction of a usual step that causes must cost together if none costs `SILENT` in most of the
time: stalls do not count, nor does each phase taking a bit longer beside other programs."""
CRITICAL = 0.2
"""Fraction of a step above which a cause is critical; between the two it is a note."""
EXPLAINED = 0.8
"""Fraction of the excess that the causes explain together, or the verdict says what is left."""
MOSTLY = 0.5
"""Fraction of the excess that the causes must explain together, or none is named."""
MOST_LINES = 3
# A step this many times as long as in the best earlier steps is too long even without a suspect.
_LONGER_THAN_BEST = 1.25
# The best of many is better than any is expected to be.
_NOT_LUCK = 1.05
# Score of the best device against itself below which all are slower.
_ALL_SLOWER = 0.85
# Of a model in stages: devices that are listed, times as long as predicted, an idle part.
_MOST_DEVICES = 6
_SLOWER = 1.25
_MUCH_IDLE = 0.2


@dataclasses.dataclass(frozen=True)
class Cause:
    """Something that makes steps longer."""

    kind: str
    devices: tuple[int, ...]
    workers: tuple[int, ...]
    severity: str
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


@dataclasses.dataclass(frozen=True, repr=False)
class Verdict:
    """The result of a diagnosis."""

    lines: tuple[str, ...]
    causes: tuple[Cause, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines or [f"No verdict: {reason}." for reason in self.missing])

    __repr__ = __str__  # what a notebook shows


def diagnose(recording: Recording, window: int = WINDOW) -> Verdict:
    """Say what makes recent steps longer than they have to be."""
    # With all suspects S repaired, the recorded steps take T(S); one costs T(S without it) - T(S),
    # over the step's time. Those that cost little are left out, unless the others explain too
    # little of the excess: of the step's time over T(S), and over the best earlier steps.
    if window < MIN_STEPS:
        raise ValueError(
            f"A diagnosis needs {MIN_STEPS} steps. Received: window={window}. Use {WINDOW}."
        )
    with np.errstate(all="ignore"):
        windows = choose_windows(recording, window)
        abstention = _abstention(recording, windows)
        if abstention:
            return Verdict((), (), (abstention,))
        if recording.pipeline is not None:
            return _of_stages(recording, recording.pipeline, windows)
        return _verdict(Situation(recording, windows))


def _abstention(recording: Recording, windows: Windows) -> str:
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


def _verdict(situation: Situation) -> Verdict:
    suspects = find_suspects(situation)
    costs, is_lasting = _costs(situation, suspects)
    order = sorted(range(len(suspects)), key=lambda index: -costs[index])
    ranked = [suspects[index] for index in order]
    number = sum(cost >= SILENT for cost in costs) if is_lasting else 0
    gap = _gap(situation, suspects, ranked[:number])
    # What is left may be several causes that cost less than that each.
    while gap and number < len(order) and costs[order[number]] >= LEAST:
        number += 1
        gap = _gap(situation, suspects, ranked[:number])
    missing = _missing(situation, ranked[:number])
    if gap:
        explained, excess = gap
        missing.append(_unexplained(situation, explained, excess))
        if explained < MOSTLY * excess or not is_lasting:
            return Verdict((), (), tuple(missing))
    elif not is_lasting:
        without = usual_seconds(*(each[None] for each in repaired(situation, ranked[:number])))
        if (situation.usual_seconds - without) / situation.step_seconds < _TOGETHER:
            number = 0
    causes = tuple(_cause(situation, suspects[index], costs[index]) for index in order[:number])
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
        saved = seconds_saved(situation, suspects, others) / situation.step_seconds
        costs.append(_fraction(saved[:2].min()))
        is_lasting |= bool(saved.min() >= SILENT)
    return costs, is_lasting


def _gap(
    situation: Situation, suspects: Sequence[Suspect], named: Sequence[Suspect]
) -> tuple[float, float] | None:
    """Return how many seconds too many of a step causes explain, of how many; None if enough."""
    of_all, of_named = (seconds_saved(situation, each) for each in (suspects, named))
    least = int(of_all.argmin())
    gaps = [(float(of_named[least]), float(of_all[least]))]
    best, now = situation.least_seconds, situation.usual_seconds
    if now > _LONGER_THAN_BEST * best:
        # Suspects may explain this and yet cost little, where noise makes steps as long.
        gaps.append((float(of_all[1]), now - _NOT_LUCK * best))
    large = [
        (explained, excess)
        for explained, excess in gaps
        if excess >= SILENT * situation.step_seconds and explained < EXPLAINED * excess
    ]
    return min(large, key=lambda gap: gap[0] / gap[1], default=None)


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
    result = what_if(situation.recording, situation.recent)
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


def _cause(situation: Situation, suspect: Suspect, cost: float) -> Cause:
    named = set(named_devices(situation, suspect))
    of_named = [part for part in suspect.told if named.issuperset(part.devices)]
    alone, of_all = (
        _fraction(seconds_saved(situation, each)[0] / situation.step_seconds)
        for each in (of_named, [suspect])
    )
    workers = (situation.recording.devices[index].worker for index in suspect.devices)
    return Cause(
        suspect.kind,
        suspect.devices,
        tuple(dict.fromkeys(workers)),
        "critical" if max(alone, of_all, cost) > CRITICAL else "note",
        alone,
        text_of(situation, suspect, alone, of_all, cost),
        advice_for(situation, suspect),
    )


def _fraction(value: float) -> float:
    return min(max(float(value), 0.0), 1.0)


def _missing(situation: Situation, named: Sequence[Suspect]) -> list[str]:
    """Return what would have told causes apart that look alike without it."""
    devices, readings = situation.recording.devices, situation.readings
    missing = []
    if len(unknown := np.flatnonzero(~situation.recent.known)):
        missing.append(f"no compute times of {listed([devices[index].name for index in unknown])}")
    for suspect in named:
        looks_like = LOOKS_LIKE.get(suspect.kind)
        if looks_like is None:
            continue
        first, is_slow = devices[suspect.devices[0]], suspect.kind == "slow_device"
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


def _of_stages(recording: Recording, record: PipelineRecord, windows: Windows) -> Verdict:
    """Say what makes the steps of a pipeline long: devices do not do the same, nor get shares."""
    recent = windows.recent
    parts = np.nan_to_num(means(recent.input) / recent.mean(recent.seconds))
    worst = int(parts.argmax())
    causes: tuple[Cause, ...] = ()
    if parts[worst] >= SILENT:
        worker, cost = recording.devices[worst].worker, min(float(parts[worst]), 1.0)
        severity = "critical" if cost > CRITICAL else "note"
        text = f"worker {worker} waits for its batch in {100 * cost:.0f} % of each step."
        advice = "Add LoaderTuner, or see the guide on input pipelines."
        causes = (Cause("input", (worst,), (worker,), severity, cost, text, advice),)
    lines = [f"{cause.text} {cause.advice}" for cause in causes]
    return Verdict((*lines, *_lines_of_stages(recording, record, windows)), causes, ())


def _lines_of_stages(recording: Recording, record: PipelineRecord, windows: Windows) -> list[str]:
    rows = np.isin(recording.steps, windows.recent.numbers)
    compute, sync = means(recording.compute[rows]), means(recording.sync[rows])
    measured = sync / np.maximum(compute + sync, 1e-12)
    used = [device for stage in record.stages for device in stage.devices]
    names = [device.name for device in recording.devices]
    predicted = record.predicted
    if predicted is None or not predicted.step_seconds > 0:
        return [_idle_line({d: f"{names[d]} {100 * measured[d]:.0f} %" for d in used}, measured)]
    idle = np.array([predicted.idle_seconds(d) for d in range(len(names))])
    idle = idle / predicted.step_seconds
    told = {
        d: f"{names[d]} {100 * idle[d]:.0f} % predicted, {100 * measured[d]:.0f} % measured"
        for d in used
    }
    lines = [_idle_line(told, idle)]
    busy = np.array([predicted.busy_seconds(d) for d in range(len(names))])
    slower = {d: compute[d] / busy[d] for d in used if busy[d] > 0}
    worst = max(slower, key=lambda d: slower[d] if np.isfinite(slower[d]) else 0.0, default=None)
    if worst is not None and slower[worst] > _SLOWER:
        lines.append(
            f"{names[worst]} computes {compute[worst] * 1e3:.3g} ms of each step, "
            f"{busy[worst] * 1e3:.3g} ms were predicted: it is slower than when the plan was made. "
            "A new PipelineStrategy measures again."
        )
    return lines


def _idle_line(told: dict[int, str], idle: Floats) -> str:
    """Return where devices are idle; shares follow from the plan, which is the place to look."""
    shown = sorted(told, key=lambda d: -np.nan_to_num(idle[d]))[:_MOST_DEVICES]
    more = f" and {len(told) - len(shown)} more" if len(told) > len(shown) else ""
    is_idle = np.nanmax(idle[list(told)], initial=0.0) > _MUCH_IDLE
    advice = "; a larger num_micro_batches idles less." if is_idle else "."
    return (
        "The model is in stages. Parts of a step in which devices are idle: "
        f"{'; '.join(told[d] for d in sorted(shown))}{more}. "
        f"Look at the plan (strategy.plan){advice}"
    )
