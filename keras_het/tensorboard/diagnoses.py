"""The verdict on a training and the numbers behind it, as plain values for JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from keras_het.planning.diagnosis.recording import Recording


def diagnosis(recording: Recording) -> dict[str, Any]:
    """Return who is slow and why, what that costs, two scores and what balancing has gained.

    All are about the same steps: the recent ones with the present shares and the present speed.

    "missing" is what the verdict would need to know: the reason, where it has no lines.
    """
    if not len(recording.steps):
        return {"verdict": [], "missing": [], "what_if": None, "scores": None, "gain": None}
    from keras_het.planning.diagnosis.scores import WINDOW, scores
    from keras_het.planning.diagnosis.steps import choose_windows
    from keras_het.planning.diagnosis.verdict import diagnose
    from keras_het.planning.diagnosis.what_if import gain_over_even, what_if

    with np.errstate(all="ignore"):
        recent = choose_windows(recording, WINDOW).recent
    # with a model in stages, steps do not wait for the slowest replica
    costs = what_if(recording, recent) if recording.pipeline is None else None
    against_best, against_own_best = scores(recording)
    verdict = diagnose(recording)
    return {
        "verdict": [str(line) for line in verdict.lines],
        "missing": [str(reason) for reason in verdict.missing],
        "what_if": costs
        and {
            "steps": [int(each) for each in recent.numbers[[0, -1]]] if len(recent.numbers) else [],
            "step_seconds": _number(costs.step_seconds),
            "by_device": _numbers(costs.by_device),
            "by_worker": {str(name): _number(value) for name, value in costs.by_worker.items()},
            "by_phase": {str(name): _number(value) for name, value in costs.by_phase.items()},
        },
        "scores": {
            "against_best": _numbers(against_best),
            "against_own_best": _numbers(against_own_best),
        },
        "gain": _number(gain_over_even(recording, recent)) if costs else None,
    }


def _numbers(values: Any) -> list[float | None]:
    return [_number(value) for value in np.asarray(values, np.float64)]


def _number(value: Any) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
