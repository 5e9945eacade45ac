"""The steps of a recording that can be compared with each other."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from keras_het.planning.diagnosis.recording import Booleans, Floats, Integers, Recording
from keras_het.planning.diagnosis.statistics import checked, filled, means
from keras_het.planning.shares import MAX_TOTAL

# The last batch of an epoch may be smaller than the batches around it.
_PARTIAL_BATCH = 0.98
# Callbacks and Python up to this fraction of the rest of a step are taken for granted.
_USUAL_OTHER = 0.25


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps without gaps, of T rows and N replicas."""

    # own = other + input + compute; step = max own + transfer; transfer = min sync: the last
    # replica waits for nobody. Other time counts as if it came before the collective: what is after
    # it delays the next step alike.

    numbers: Integers
    weights: Floats
    compute: Floats
    input: Floats
    other: Floats
    transfer: Floats
    shares: Floats
    known: Booleans

    @functools.cached_property
    def own(self) -> Floats:
        """Time of each replica before the collective in seconds, float64 of shape [T, N]."""
        return self.compute + self.input + self.other

    @functools.cached_property
    def times(self) -> Floats:
        """Times of replicas before the collective, then of the transfer, of shape [T, N + 1]."""
        return np.column_stack([self.own, self.transfer])

    @functools.cached_property
    def seconds(self) -> Floats:
        """Time of each step, float64 of shape [T]."""
        return step_seconds(self.times)

    @functools.cached_property
    def least_other(self) -> float:
        """Other time in seconds that a replica must spend: the least of them, or a usual part."""
        # Callbacks that all replicas have make no difference between them.
        least = float(means(self.other).min()) if self.other.size else 0.0
        return min(least, _USUAL_OTHER * (self.mean(self.seconds) - least))

    def mean(self, values: Floats) -> float:
        """Return the mean over steps, of which a row may stand for several."""
        return float(values @ self.weights / self.weights.sum()) if len(values) else np.nan

    def rows(self, chosen: slice | Integers) -> Steps:
        names = {field.name for field in dataclasses.fields(self)} - {"known"}
        return dataclasses.replace(self, **{name: getattr(self, name)[chosen] for name in names})


def step_seconds(times: Floats) -> Floats:
    """Return the time of each step, of times as in `Steps.times`."""
    return np.asarray(times[..., :-1].max(axis=-1, initial=0.0) + times[..., -1])


def steps_of(recording: Recording, rows: Integers) -> Steps:
    """Return rows of a recording, with medians in place of single unknown values."""
    compute, waited, sync, other = (
        checked(values[rows])
        for values in (recording.compute, recording.input, recording.sync, recording.other)
    )
    known = np.asarray((~np.isnan(compute)).any(axis=0))
    shares = checked(recording.shares[rows], MAX_TOTAL)
    if np.isnan(shares).all():
        shares = np.ones_like(shares)
    lowest = np.where(np.isnan(sync), np.inf, sync).min(axis=1, initial=np.inf)
    transfer = np.where(np.isinf(lowest), np.nan, lowest)
    return Steps(
        recording.steps[rows],
        _weights(recording)[rows],
        filled(compute),
        filled(waited),
        filled(other),
        filled(transfer[:, None])[:, 0],
        filled(shares),
        known,
    )


def comparable_rows(recording: Recording) -> Integers:
    """Return the rows with their own times, samples and a whole global batch."""
    compute = np.asarray(recording.compute, np.float64)
    timed = np.isfinite(compute).any(axis=1)
    shares = np.asarray(recording.shares, np.float64)
    total = np.where(np.isfinite(shares), shares, 0.0).sum(axis=1)
    before, after = np.roll(total, 1), np.roll(total, -1)
    if len(total):
        before[0], after[-1] = total[0], total[-1]
    partial = total < _PARTIAL_BATCH * np.maximum(before, after)
    unknown = ~np.isfinite(shares).any(axis=1)
    # repeated rows would look like steps without noise
    own = timed if recording.measured is None else timed & recording.measured
    return np.flatnonzero(own & (unknown | ((total > 0) & ~partial)))


def _weights(recording: Recording) -> Floats:
    """How many steps rows stand for: those up to the next row, or since the last measured one."""
    if recording.measured is not None and not recording.measured.all():
        measured = np.flatnonzero(recording.measured)
        weights = np.ones(len(recording.steps))
        weights[measured] = np.diff(measured, prepend=-1)
        return weights
    numbers = np.asarray(recording.steps, np.float64)
    if len(numbers) < 2:
        return np.ones(len(numbers))
    return np.append(np.maximum(np.diff(numbers), 1.0), 1.0)
