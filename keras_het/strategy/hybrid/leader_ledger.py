"""The sample ledger as the leader uses it where another process holds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.strategy.parameter_service.ledger_client import LedgerClient
from keras_het.strategy.parameter_service.sample_ledger import LARGEST_EPOCH, Presence, Stage

_NO_CHANGE = -1


class LeaderLedger:
    """What `SampleLedger` offers in its own process, by messages.

    Args:
        client: connection of client 0.

    Raises:
        ServiceLostError: by all methods, if there is no answer in time.
    """

    def __init__(self, client: LedgerClient) -> None:
        self._client = client
        self._last: np.ndarray | None = None
        self._facts = [int(Stage.STARTING), 0, 0, 0, 0, 0, 0]

    def start_epoch(
        self,
        epoch: int,
        num_batches: int,
        fingerprint: int,
        first_pass: int = 0,
        run: int = 0,
        num_epochs: int = LARGEST_EPOCH,
    ) -> None:
        """Begins an epoch, as `SampleLedger.start_epoch`."""
        self._facts[1:] = [epoch, num_batches, fingerprint, first_pass, run, num_epochs]
        self._lead()

    def set_stage(self, stage: Stage) -> None:
        """Tells all clients how far training is."""
        self._facts[0] = int(stage)
        self._lead()

    def claim(self, client: int, epoch: int, count: int) -> tuple[int, int]:
        """Takes the next batches of an epoch; the first one, and how many."""
        del client
        _, first, granted = self._client.claim(epoch, count)
        return first, granted

    def is_handed_out(self, epoch: int) -> bool:
        """Whether all batches of an epoch were handed out."""
        return epoch == self._facts[1] and self._ask(0, _NO_CHANGE)[0, 4] <= 0

    def add_used(self, client: int, samples: int) -> None:
        """Counts samples that the leader's group has used."""
        del client
        self._ask(samples, _NO_CHANGE)

    def present(self, presence: Presence, within_seconds: float) -> list[int]:
        """Clients that were heard of lately, as `SampleLedger.present`."""
        overview = self._ask(0, _NO_CHANGE)
        chosen = (overview[:, 0] == int(presence)) & (overview[:, 1] < within_seconds)
        return [int(client) for client in np.flatnonzero(chosen)]

    @property
    def claimed(self) -> np.ndarray:
        """Global batches handed out to each client."""
        return self._ask(0, _NO_CHANGE)[:, 2].astype(np.int64)

    @property
    def used(self) -> np.ndarray:
        """Samples that each client has used."""
        return self._ask(0, _NO_CHANGE)[:, 3].astype(np.int64)

    def keep(self) -> None:
        """Asks a last time; what it was told stays, when the other process is gone."""
        self._last = self._ask(0, _NO_CHANGE)

    def _lead(self) -> None:
        self._ask(0, self._facts[0])

    def _ask(self, used: int, stage: int) -> np.ndarray:
        if self._last is not None:
            return self._last
        facts = [stage, *self._facts[1:]]
        specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([None, 5], tf.float64))
        arguments: list[Any] = [tf.constant(used, tf.int64), tf.constant(facts, tf.int64)]
        overview: np.ndarray = self._client.ask("lead", arguments, specs)[1].numpy()
        return overview
