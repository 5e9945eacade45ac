"""The way to a center in the same process: every answer is there at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.parameter_service.client import Answer, PendingPush
from keras_het.asynchronous.parameter_service.service import ParameterService
from keras_het.asynchronous.parameter_service.wire import FloatWire, Wire
from keras_het.asynchronous.rules import Signal
from keras_het.rpc.admission import Status


class AnsweredCall(NamedTuple):
    """A call whose answer is there, in the form of TensorFlow's status-or-value."""

    version: np.int64
    values: tf.Tensor

    def is_ok(self) -> tf.Tensor:
        """Return true."""
        return tf.constant(True)

    def get_value(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return status, version and values."""
        return tf.constant(int(Status.OK)), tf.constant(self.version), self.values


class LocalTransport:
    """A `ParameterClient` without messages: no push is lost, told to wait or too stale."""

    wire_is_exact = True

    def __init__(self, service: ParameterService, client: int) -> None:
        self._service, self._client = service, client
        self.partitions = service.partitions

    def use_wire(self, wire: Wire) -> None:
        """Do nothing: no message is encoded."""

    def greet(self) -> None:
        """Do nothing: the service is there."""

    def latest_sequence(self) -> int:
        """Return 0: these pushes need no number to count once."""
        return 0

    def signal(self, signal: Signal, client: int | None = None) -> int | None:
        """Send the rule a signal about a participant; return the stage of training."""
        return self._service.signal_locally(self._client if client is None else client, signal)

    def pull(self, fallback: Iterable[tf.Tensor], exact: bool = False) -> Answer:
        """Read the center."""
        del exact
        return self._answered(self._service.center_partitions(), []).answer(fallback)

    def start_push(
        self,
        changes: Sequence[tf.Tensor],
        versions: np.ndarray | tf.Tensor,
        samples: float,
        sequence: int | tf.Tensor = 0,
    ) -> PendingPush:
        """Change the center at once; a rejected partition is answered with its center."""
        del versions, sequence
        values = self._service.exchange_locally(self._client, samples, changes)
        return self._answered(values, changes)

    def push_again(self, push: PendingPush, indices: Sequence[int]) -> None:
        """Do nothing: the push was answered."""

    def ask_turns(self, push: PendingPush, indices: Sequence[int]) -> list[int]:
        """Return that all parts may be sent."""
        return [int(Status.OK)] * len(indices)

    def _answered(self, values: Sequence[tf.Tensor], changes: Sequence[tf.Tensor]) -> PendingPush:
        calls = map(AnsweredCall, self._service.versions(), values)
        return PendingPush(self, list(calls), list(changes), [], FloatWire(), [])
