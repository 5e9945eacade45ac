"""The leader's interface to a sample ledger in another process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.parameter_service.ledger_connection import LedgerConnection
from keras_het.asynchronous.parameter_service.sample_ledger import Presence, Stage, TrainingFacts
from keras_het.asynchronous.parameter_service.used_samples import UsedSamples

_NO_CHANGE = -1


class LeaderLedger:
    """Message-based counterpart of a local `SampleLedger`."""

    def __init__(self, connection: LedgerConnection) -> None:
        self._connection = connection
        self._stage, self._epoch = Stage.STARTING, 0
        self._training = TrainingFacts(0)
        self._latest = np.zeros([0, 6])
        self._used = UsedSamples()
        self._is_kept = False

    def start_epoch(self, epoch: int, training: TrainingFacts) -> None:
        """Store an epoch of the sync group for `tell`."""
        self._epoch, self._training = epoch, training

    def set_stage(self, stage: Stage) -> None:
        """Store the stage of training for `tell`."""
        self._stage = stage

    def tell(self, taken_until: int = 0) -> None:
        """Send the latest stored facts to the ledger."""
        self._ask(stage=int(self._stage), taken_until=taken_until)

    def claim(self, participant: int, epoch: int, count: int) -> tuple[int, int]:
        """Claim the next batches of an epoch; return the first one and their number."""
        del participant
        _, first, granted = self._connection.claim(epoch, count)
        return first, granted

    def is_handed_out(self, epoch: int) -> bool:
        """Whether all batches of an epoch have been handed out."""
        return bool(epoch == self._epoch and self._ask()[0, 4] <= 0)

    def add_used(self, participant: int, samples: int) -> None:
        """Store samples that the leader's group has used, for `tell_used`."""
        del participant
        self._used.add(samples)

    def tell_used(self) -> None:
        """Report all stored samples to the ledger, which counts each once."""
        while not (self._used.is_empty or self._is_kept):
            self._ask()

    def pace(self, participant: int, pace: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """Report the pace of the leader's group and ask for all paces: `SampleLedger.pace`."""
        del participant
        return self._connection.pace(pace)

    def present(self, presence: Presence, within_seconds: float) -> list[int]:
        """Return participants heard from recently, like `SampleLedger.present`."""
        overview = self._ask()
        chosen = (overview[:, 0] == int(presence)) & (overview[:, 1] < within_seconds)
        return [int(participant) for participant in np.flatnonzero(chosen)]

    @property
    def claimed(self) -> np.ndarray:
        """Global batches handed out to each participant."""
        return self._ask()[:, 2].astype(np.int64)

    @property
    def used(self) -> np.ndarray:
        """Number of samples that each participant has used."""
        return self._ask()[:, 3].astype(np.int64)

    def keep(self) -> None:
        """Stop asking and keep the last answer for when the other process is gone."""
        self._is_kept = True

    def _ask(self, stage: int = _NO_CHANGE, taken_until: int = 0) -> np.ndarray:
        if not self._is_kept:
            facts = [stage, taken_until, self._epoch, *self._training]
            specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([None, 6], tf.float64))
            used = tf.constant(self._used.report(), tf.int64)
            arguments: list[tf.Tensor] = [used, tf.constant(facts, tf.int64)]
            self._latest = self._connection.ask("lead", arguments, specs)[1].numpy()
            self._used.answered(int(self._latest[0, 5]))
        return self._latest
