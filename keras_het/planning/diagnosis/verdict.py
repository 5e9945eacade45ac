"""Why steps are longer than they have to be, in at most three lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_het.planning.diagnosis.pipeline_lines import input_parts, pipeline_lines
from keras_het.planning.diagnosis.pipeline_record import PipelineRecord
from keras_het.planning.diagnosis.recording import Recording
from keras_het.planning.diagnosis.scores import WINDOW
from keras_het.planning.diagnosis.situation import Situation, usual_seconds
from keras_het.planning.diagnosis.suspect import Suspect
from keras_het.planning.diagnosis.suspects import (
    find_suspects,
    repaired,
    seconds_saved,
)
from keras_het.planning.diagnosis.what_if import PHASE_REPAIRS, what_if
from keras_het.planning.diagnosis.windows import MIN_STEPS, Windows, choose_windows
from keras_het.planning.diagnosis.wording import (
    Saving,
    advice_for,
    device_names,
    named_devices,
    text_of,
)

CAUSES = (
    "slow_device",
    "throttled_device",
    "input",
    "host",
    "other_program",
    "link",
    "shares",
    "other",
)
"""Kinds of causes: "host" is a lack of CPUs, "other" the time of callbacks and Python."""
SILENT = 0.1
"""Fraction of a step below which a cause is not named."""
LEAST = 0.03
"""The same for a cause that is named along with others. If all are below `SILENT`, they must cost
that much together in a typical step, so that a few stalls do not count."""
CRITICAL = 0.2
"""Fraction of a step above which a cause is critical; between the two it is a note."""
EXPLAINED = 0.8
"""Fraction of the excess that the causes explain together, or the verdict says what is left."""
MOSTLY = 0.5
"""Fraction of the excess that the causes must explain together, or none is named."""
MOST_LINES = 3
_LOOKS_LIKE_LACK_OF_CPUS = {
    "slow_device": "a slow device",
    "input": "a slow pipeline",
    "other": "slow callbacks",
}
# A step this many times as long as in the best earlier steps is too long even without a suspect.
_LONGER_THAN_BEST = 1.25
# The best of many is better than any is expected to be.
_NOT_LUCK = 1.05
# Score of the best device against itself below which all are slower.
_ALL_SLOWER = 0.85


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
    r"""Say what makes recent steps longer than they have to be.

    Every suspect s (a slow device, a worker that waits for its input, ...) is repaired in the
    recorded steps, and their time computed again. With all suspects S repaired, the step takes
    T(S); a suspect costs what remains when all others are repaired,

    .. math:: cost_s = T(S \setminus s) - T(S)

    over the step's time. Noise makes devices wait for each other, too: the cost is the smaller of
    the mean over steps and of that between mean times; and none is named if none costs as much in
    most of the time: a few stalls are no cause. The lines tell what the repair of the
    devices that they name saves if all else stays as it is, as `what_if` does; and what it saves
    with those that are left, where that is more.
    Suspects that cost less than a tenth of the step are left out, unless the others explain less
    than 80 % of the excess: of the step's time over T(S), and over the best earlier steps. If all
    explain less, the verdict says how much is left, and if it is more than half, names no cause.

    In a pipeline, devices have different layers: a step waits for its plan, and the verdict says
    how long each device is idle, as predicted and as measured.
    """
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
            return _pipeline_verdict(recording, recording.pipeline, windows)
        return _verdict(Situation(recording, windows))


def _pipeline_verdict(recording: Recording, record: PipelineRecord, windows: Windows) -> Verdict:
    """Say what makes the steps of a pipeline long: devices do not do the same, nor get shares."""
    parts = np.nan_to_num(input_parts(windows))
    worst = int(parts.argmax())
    causes: tuple[Cause, ...] = ()
    if parts[worst] >= SILENT:
        worker = recording.devices[worst].worker
        cost = min(float(parts[worst]), 1.0)
        causes = (
            Cause(
                "input",
                (worst,),
                (worker,),
                "critical" if cost > CRITICAL else "note",
                cost,
                f"worker {worker} waits for its batch in {100 * cost:.0f} % of each step.",
                "Add LoaderTuner, or see the guide on input pipelines.",
            ),
        )
    lines = [f"{cause.text} {cause.advice}" for cause in causes]
    return Verdict((*lines, *pipeline_lines(recording, record, windows)), causes, ())


def _abstention(recording: Recording, windows: Windows) -> str:
    if not recording.devices:
        return "no devices"
    if windows.wanted >= MIN_STEPS and windows.recent.own.max(initial=0.0) > 0:
        return ""
    if not np.isfinite(recording.compute).any() and len(recording.steps) >= MIN_STEPS:
        return "no compute times: cannot tell devices apart"
    steps = f"{windows.wanted} of {MIN_STEPS}"
    if windows.since_shares is not None:
        return f"not enough steps since shares changed in step {windows.since_shares}: {steps}"
    return f"not enough steps yet: {steps}"


def _verdict(situation: Situation) -> Verdict:
    suspects = find_suspects(situation)
    costs, is_lasting = _costs(situation, suspects)
    order = sorted(range(len(suspects)), key=lambda index: -costs[index])
    number = sum(cost >= SILENT for cost in costs) if is_lasting else 0
    named = [suspects[index] for index in order]
    gap = _gap(situation, suspects, named[:number])
    # What is left may be several causes that cost less than that each.
    while gap and number < len(order) and costs[order[number]] >= LEAST:
        number += 1
        gap = _gap(situation, suspects, named[:number])
    missing = _missing(situation, named[:number])
    if gap:
        missing.append(_unexplained(situation, gap))
        if gap.explained < MOSTLY * gap.excess or not is_lasting:
            return Verdict((), (), tuple(missing))
    elif not is_lasting and _usual_cost(situation, named[:number]) < SILENT:
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
    costs, is_lasting = [], False
    for index in range(len(suspects)):
        others = [*suspects[:index], *suspects[index + 1 :]]
        saved = seconds_saved(situation, suspects, others) / situation.step_seconds
        costs.append(float(min(max(saved[:2].min(), 0.0), 1.0)))
        is_lasting |= bool(saved.min() >= SILENT)
    return costs, is_lasting


def _nothing_to_do(situation: Situation) -> str:
    """Say that there is no cause, beside a table that may know of something to save."""
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
        return f"Nothing to do: no cause takes {SILENT * 100:.0f} % of a step."
    why = "is usual" if best == PHASE_REPAIRS["sync"] else "cannot be told from noise"
    return f"No cause stands out: {best} would save {most * 100:.0f} % of a step, which {why}."


def _usual_cost(situation: Situation, named: Sequence[Suspect]) -> float:
    """Return what some suspects cost together in a usual step, as a fraction of the mean step."""
    own, transfer = repaired(situation, named)
    saved = situation.usual_seconds - usual_seconds(own[None], transfer[None])
    return saved / situation.step_seconds


@dataclasses.dataclass(frozen=True)
class _Gap:
    """Seconds of each step that are more than necessary, and how many of them causes explain."""

    explained: float
    excess: float


def _gap(
    situation: Situation, suspects: Sequence[Suspect], named: Sequence[Suspect]
) -> _Gap | None:
    """Return what causes leave unexplained, None if they explain enough."""
    of_all, of_named = (seconds_saved(situation, each) for each in (suspects, named))
    least = int(of_all.argmin())
    gaps = [_Gap(float(of_named[least]), float(of_all[least]))]
    best, now = situation.least_seconds, situation.usual_seconds
    if now > _LONGER_THAN_BEST * best:
        # Suspects may explain this and yet cost little, where noise makes steps as long.
        gaps.append(_Gap(float(of_all[1]), now - _NOT_LUCK * best))
    least_excess = SILENT * situation.step_seconds
    large = [
        gap for gap in gaps if gap.excess >= least_excess and gap.explained < EXPLAINED * gap.excess
    ]
    return min(large, key=lambda gap: gap.explained / gap.excess, default=None)


def _unexplained(situation: Situation, gap: _Gap) -> str:
    """Return what causes leave unexplained, for people."""
    found = (
        f"{gap.excess * 1e3:.3g} ms of each step are more than necessary, and what is known "
        f"explains {max(gap.explained, 0.0) * 1e3:.3g} ms"
    )
    if situation.common < _ALL_SLOWER:
        return (
            f"{found}: all devices compute {1 / situation.common:.1f} times as long as in their "
            "own best steps; samples may have become larger"
        )
    return found


def _cause(situation: Situation, suspect: Suspect, cost: float) -> Cause:
    workers = (situation.recording.devices[index].worker for index in suspect.devices)
    saving = _saving(situation, suspect, cost)
    return Cause(
        suspect.kind,
        suspect.devices,
        tuple(dict.fromkeys(workers)),
        "critical" if saving.most > CRITICAL else "note",
        saving.alone,
        text_of(situation, suspect, saving),
        advice_for(situation, suspect),
    )


def _saving(situation: Situation, suspect: Suspect, cost: float) -> Saving:
    """Return what its repair saves: of the devices that its line names, and of all."""

    def saved(of: Sequence[Suspect]) -> float:
        seconds = float(seconds_saved(situation, of)[0])
        return min(max(seconds / situation.step_seconds, 0.0), 1.0)

    named = set(named_devices(situation, suspect))
    alone = saved([part for part in suspect.told if named.issuperset(part.devices)])
    return Saving(alone, saved([suspect]), cost, suspect.follows)


def _missing(situation: Situation, named: Sequence[Suspect]) -> list[str]:
    """Return what would have told causes apart that look alike without it."""
    devices, readings = situation.recording.devices, situation.readings
    missing = []
    if len(unknown := np.flatnonzero(~situation.recent.known)):
        missing.append(f"no compute times of {device_names(situation, tuple(unknown.tolist()))}")
    for suspect in named:
        if not suspect.devices or suspect.kind not in _LOOKS_LIKE_LACK_OF_CPUS:
            continue
        first = devices[suspect.devices[0]]
        if suspect.kind == "slow_device" and first.kind != "CPU":
            if not readings.knows_clock(suspect.devices[0]):
                missing.append(
                    f"no clock readings of {first.name}: cannot tell a throttled device from a "
                    "slow one"
                )
        elif not readings.knows_host(first.worker):
            missing.append(
                f"no CPU readings of worker {first.worker}: cannot tell a lack of CPUs from "
                f"{_LOOKS_LIKE_LACK_OF_CPUS[suspect.kind]}"
            )
        elif suspect.kind == "slow_device" and _has_other_programs(situation, first.worker):
            missing.append(
                "no readings of single CPUs: cannot tell whether other programs take more from "
                f"worker {first.worker} than from those that have as little left"
            )
    return missing


def _has_other_programs(situation: Situation, worker: int) -> bool:
    host = situation.host(worker)
    return host is not None and host.kind == "other_program"
