"""Who is slow and why, what that costs, what balancing has gained: for the tab and the report."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.diagnosis.recording import Floats, Recording
from keras_het.planning.diagnosis.scores import WINDOW, scores
from keras_het.planning.diagnosis.steps import Steps, choose_windows
from keras_het.planning.diagnosis.verdict import Verdict, diagnose
from keras_het.planning.diagnosis.what_if import WhatIf, gain_over_even, what_if


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What is known of the recent steps, those with the present shares and the present speed."""

    verdict: Verdict
    recent: Steps
    against_best: Floats
    against_own_best: Floats
    costs: WhatIf | None = None
    gain: float = np.nan
    """How many times the samples/s of even shares the present ones bring; NaN if unknown."""


def diagnosis_of(recording: Recording) -> Diagnosis:
    """Diagnose a training or a part of it.

    Of a model in stages there are no costs: its steps do not wait for the slowest replica.
    """
    with np.errstate(all="ignore"):
        recent = choose_windows(recording, WINDOW).recent
        known = Diagnosis(diagnose(recording), recent, *scores(recording))
        if recording.pipeline is not None or not recent.mean(recent.seconds) > 0:
            return known
        costs, gain = what_if(recording, recent), gain_over_even(recording, recent)
        return dataclasses.replace(known, costs=costs, gain=gain)
