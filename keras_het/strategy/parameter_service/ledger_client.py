"""Asks the sample ledger of another process."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

import tensorflow as tf

from keras_het import private_api
from keras_het.strategy.parameter_service.admission import Status
from keras_het.strategy.parameter_service.sample_ledger import PREFIX, Presence, Stage


class ServiceLostError(RuntimeError):
    """The parameter service did not answer in time."""


@dataclasses.dataclass(frozen=True)
class LedgerFacts:
    """What the ledger says about training.

    Args:
        stage: how far it is.
        epoch: the sync group's epoch.
        num_batches: global batches of an epoch.
        fingerprint: of the order of the samples, 0 if not known.
        first_pass: number of epoch 0's pass over the data.
        run: number of the training among those of the leader's process.
    """

    stage: Stage
    epoch: int
    num_batches: int
    fingerprint: int
    first_pass: int
    run: int


class LedgerClient:
    """Talks to a `SampleLedger`.

    Args:
        address: "host:port" of the service.
        credential: as the service has it.
        client: number of this worker, from 1; None for functions that do not ask for it.
        timeout_seconds: for each message.
        prefix: of the functions' names.
    """

    def __init__(
        self,
        address: str,
        credential: bytes,
        client: int | None,
        timeout_seconds: float,
        prefix: str = PREFIX,
    ) -> None:
        self._prefix = prefix
        self._address = address
        self._timeout_ms = int(timeout_seconds * 1000)
        self._credential = tf.constant(credential)
        self._client = [] if client is None else [tf.constant(client)]
        name = f"keras_het_{uuid.uuid4().hex}"
        self._rpc = private_api.RpcClient(
            address, name, list_registered_methods=False, timeout_in_ms=self._timeout_ms
        )

    def claim(self, epoch: int, count: int = 1) -> tuple[Status, int, int]:
        """Takes the next batches of an epoch.

        Returns:
            Status (`WAIT`: not now), the first batch, and how many; 0 at the end of the epoch.

        Raises:
            ServiceLostError: if there is no answer in time.
        """
        number = tf.TensorSpec([], tf.int64)
        arguments = [tf.constant(epoch, tf.int64), tf.constant(count, tf.int64)]
        specs = (tf.TensorSpec([], tf.int32), number, number)
        status, first, granted = self.ask("claim", arguments, specs)
        return Status(int(status)), int(first), int(granted)

    def report(self, presence: Presence, used: int = 0) -> LedgerFacts:
        """Says what this worker is doing, counts samples, and asks how things are.

        Args:
            presence: what this worker is doing.
            used: samples used since the last report.

        Raises:
            ServiceLostError: if there is no answer in time.
        """
        arguments = [tf.constant(used, tf.int64), tf.constant(int(presence))]
        specs = (tf.TensorSpec([], tf.int32), tf.TensorSpec([6], tf.int64))
        _, facts = self.ask("report", arguments, specs)
        stage, *numbers = (int(fact) for fact in facts)
        return LedgerFacts(Stage(stage), *numbers)

    def ask(self, method: str, arguments: list[Any], specs: Any) -> Any:
        """Calls a function of the ledger.

        Args:
            method: its name.
            arguments: after credential and client.
            specs: types of the answer, a status first.

        Raises:
            ServiceLostError: if there is no answer in time.
            PermissionError: if the ledger refuses this worker.
        """
        answer = self._rpc.call(
            f"{self._prefix}{method}",
            [self._credential, *self._client, *arguments],
            output_specs=specs,
            timeout_in_ms=self._timeout_ms,
        )
        if not bool(answer.is_ok()):
            code, message = answer.get_error()
            raise ServiceLostError(
                f"The parameter service at {self._address} did not answer within "
                f"{self._timeout_ms / 1000:g} s. Received: error {int(code)}, "
                f"{message.numpy().decode(errors='replace')!r}. Its process may be gone; give "
                'on_service_loss="continue" to go on without it.'
            )
        values = answer.get_value()
        if int(values[0]) in (Status.REFUSED, Status.UNKNOWN_CLIENT):
            raise PermissionError(
                f"The parameter service at {self._address} refused this worker. Received: status "
                f"{Status(int(values[0])).name}. Use the same script, TF_CONFIG cluster and secret "
                "on every task."
            )
        return values
