"""Who is slow and why, what that costs, what balancing has gained: for the tab and the report."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.diagnosis.recording import Floats, Recording
from keras_het.planning.diagnosis.scores import WINDOW, device_lines, scores
from keras_het.planning.diagnosis.steps import Steps, choose_windows
from keras_het.planning.diagnosis.verdict import Verdict, diagnose
from keras_het.planning.diagnosis.what_if import WhatIf, seconds_with_shares, what_if_of_steps


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What is known of the recent steps, those with the present shares and the present speed."""

    verdict: Verdict
    recent: Steps
    against_best: Floats
    against_own_best: Floats
    costs: WhatIf | None = None
    even_seconds: float = np.nan

    @property
    def gain(self) -> float:
        """How many times the samples/s of even shares the present ones bring; NaN if unknown."""
        return np.nan if self.costs is None else self.even_seconds / self.costs.step_seconds


def diagnosis_of(recording: Recording) -> Diagnosis:
    """Diagnose a training or a part of it.

    Of a model in stages there are no costs: its steps do not wait for the slowest replica.
    """
    with np.errstate(all="ignore"):
        recent = choose_windows(recording, WINDOW).recent
        known = Diagnosis(diagnose(recording), recent, *scores(recording))
        if recording.pipeline is not None or not recent.mean(recent.seconds) > 0:
            return known
        lines = device_lines(recording, recent)
        even = recent.shares.sum(axis=1, keepdims=True) / len(recording.devices)
        return dataclasses.replace(
            known,
            costs=what_if_of_steps(recent, lines, recording.devices),
            even_seconds=seconds_with_shares(
                recent, lines, np.broadcast_to(even, recent.shares.shape)
            ),
        )
