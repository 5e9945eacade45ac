"""Connection to a sample ledger in another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.asynchronous.parameter_service.sample_ledger import (
    PREFIX,
    Presence,
    Stage,
    TrainingFacts,
)
from keras_het.asynchronous.parameter_service.used_samples import UsedSamples
from keras_het.rpc.admission import Status
from keras_het.rpc.function_client import FunctionClient, NoAnswerError


class ServiceLostError(RuntimeError):
    """The parameter service did not answer in time."""

    def __init__(self, message: str, is_new_process: bool = False) -> None:
        super().__init__(message)
        self.is_new_process = is_new_process


@dataclasses.dataclass(frozen=True)
class LedgerFacts:
    """The ledger's facts about training."""

    stage: Stage
    epoch: int
    training: TrainingFacts


class LedgerConnection:
    """One participant's connection to a `SampleLedger`."""

    def __init__(
        self, address: str, credential: bytes, participant: int, timeout_seconds: float
    ) -> None:
        self._service = FunctionClient(address, credential, timeout_seconds)
        self._participant = tf.constant(participant)
        self._used = UsedSamples()

    def claim(self, epoch: int, count: int = 1) -> tuple[Status, int, int]:
        """Claim the next batches of an epoch."""
        return self.claimed(self.start_claim(epoch, count))

    def start_claim(self, epoch: int, count: int = 1) -> Any:
        """Ask like `claim` without waiting: `claimed` returns the answer."""
        number = tf.TensorSpec([], tf.int64)
        arguments = [tf.constant(epoch, tf.int64), tf.constant(count, tf.int64)]
        return self._start("claim", arguments, (tf.TensorSpec([], tf.int32), number, number))

    def claimed(self, answer: Any) -> tuple[Status, int, int]:
        """Wait for the answer to `start_claim`."""
        status, first, granted = self._admitted(lambda: self._service.value(answer))
        return Status(int(status)), int(first), int(granted)

    def report(self, presence: Presence, used: int = 0) -> LedgerFacts:
        """Report this worker's activity and samples, and ask for the state of training."""
        self._used.add(used)
        facts = self._report(presence)
        while not self._used.is_empty:
            facts = self._report(presence)
        return facts

    def _report(self, presence: Presence) -> LedgerFacts:
        arguments = [tf.constant(self._used.report(), tf.int64), tf.constant(int(presence))]
        specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([8], tf.int64))
        status, facts = self.ask("report", arguments, specs)
        if int(status) == Status.CLOSED:
            raise ServiceLostError(
                f"The parameter service at {self._service.address} belongs to a training that has "
                "ended, of another model, update rule, format of messages or secret. Received: "
                "status CLOSED. The next training's service takes its place when its leader "
                "begins."
            )
        stage, epoch, *numbers, latest = (int(fact) for fact in facts)
        self._used.answered(latest)
        return LedgerFacts(Stage(stage), epoch, TrainingFacts(*numbers))

    def pace(self, pace: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """Report this worker's pace and ask for all paces: `SampleLedger.pace`."""
        numbers = tf.TensorSpec(None, tf.float64)
        specs = (tf.TensorSpec([], tf.int32), numbers, numbers)
        _, paces, silence = self.ask("pace", [tf.constant(pace, tf.float64)], specs)
        return paces.numpy(), silence.numpy()

    def ask(self, method: str, arguments: list[tf.Tensor], specs: tuple[tf.TensorSpec, ...]) -> Any:
        """Call a function of the ledger."""
        name, message = f"{PREFIX}{method}", [self._participant, *arguments]
        return self._admitted(lambda: self._service.ask(name, message, specs))

    def _start(
        self, method: str, arguments: list[tf.Tensor], specs: tuple[tf.TensorSpec, ...]
    ) -> Any:
        return self._service.call(f"{PREFIX}{method}", [self._participant, *arguments], specs)

    def _admitted(self, wait: Callable[[], Any]) -> Any:
        """Wait for an answer, and check that the ledger admits this worker."""
        try:
            values = wait()
        except NoAnswerError as error:
            raise ServiceLostError(
                f"The parameter service at {error} Its process may be gone; give "
                'on_service_loss="continue" to go on without it.',
                error.is_unknown_function,
            ) from error
        if int(values[0]) in (Status.REFUSED, Status.UNKNOWN_CLIENT):
            raise PermissionError(
                f"The parameter service at {self._service.address} refused this worker. Received: "
                f"status {Status(int(values[0])).name}: its secret, model, update rule with its "
                "settings, messages (wire, partition_bytes) or number differs. Use the same "
                "script, TF_CONFIG cluster and secret on every task."
            )
        return values
