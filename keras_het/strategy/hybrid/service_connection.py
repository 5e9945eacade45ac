"""An async worker's connection to the parameter service: opened, lost, opened again."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het.strategy.hybrid.participant import STATE_PREFIX, WEIGHTS_PREFIX
from keras_het.strategy.parameter_service import NO_ANSWER, ParameterClient, Status
from keras_het.strategy.parameter_service.client import PendingPush
from keras_het.strategy.parameter_service.ledger_client import LedgerClient, ServiceLostError

_POLL_SECONDS = 0.05


@dataclasses.dataclass
class Pending:
    """A push under way; it can be sent again, and counts once.

    Args:
        push: the messages.
        samples: samples behind the change.
        versions: version of each partition that the worker had seen.
        sequence: number of the push.
        sent: weights that the worker went on with, for each partition.
    """

    push: PendingPush
    samples: int
    versions: Any
    sequence: int
    sent: list[Any]


class CenterClient:
    """Exchanges one worker's vectors with the service.

    Args:
        client: the connection of these vectors.
        rule: the update rule.

    Attributes:
        seen: the answer of the last exchange, for each partition.
    """

    def __init__(self, client: ParameterClient, rule: Any) -> None:
        self._client, self._rule = client, rule
        self.seen: list[Any] = []
        self._versions = np.zeros(len(client.partitions.sizes), np.int64)
        self._residuals: list[Any] | None = None
        self._sequence = 0

    def pull(self) -> list[Any]:
        """The center.

        Raises:
            ServiceLostError: if there is no answer in time.
        """
        fallback = [tf.zeros([size]) for size in self._client.partitions.sizes]
        answer = self._client.pull(fallback)
        statuses = answer.statuses.numpy()
        if (statuses != int(Status.OK)).any():
            raise ServiceLostError(_lost(statuses))
        self._versions = answer.versions.numpy()
        return list(answer.partitions)

    def adopt(self, center: list[Any]) -> None:
        """Takes the center for what was seen last."""
        self.seen, self._residuals = center, None

    def send(self, weights: list[Any], samples: int) -> Pending:
        """Sends the rule's message.

        Args:
            weights: the worker's weights, for each partition.
            samples: samples behind the change.

        Returns:
            What is under way.
        """
        pairs = list(zip(weights, self.seen, strict=True))
        messages = [self._rule.message(w, seen) for w, seen in pairs]
        if self._residuals is not None:
            messages = [m + r for m, r in zip(messages, self._residuals, strict=True)]
        self._sequence += 1
        versions = self._versions.copy()
        push = self._client.start_push(messages, versions, samples, self._sequence)
        sent = [self._rule.after_sending(w, seen) for w, seen in pairs]
        return Pending(push, samples, versions, self._sequence, sent)

    def finish(self, pending: Pending, weights: list[Any]) -> list[Any]:
        """Waits for the answer and combines it with the weights of now.

        A part whose push was too stale starts from the center again with the worker's own progress.

        Args:
            pending: what `send` gave; after a loss it may be given again.
            weights: the worker's weights now, for each partition.

        Returns:
            The weights to go on with.

        Raises:
            ServiceLostError: if a part was not answered in time. Nothing has changed then.
        """
        answer = pending.push.answer(self.seen)
        statuses, versions = answer.statuses.numpy(), answer.versions.numpy()
        if (statuses == NO_ANSWER).any():
            raise ServiceLostError(_lost(statuses))
        carried = [
            self._part(
                index, int(status), answer.partitions[index], pending.sent[index], weights[index]
            )
            for index, status in enumerate(statuses)
        ]
        taken = np.isin(statuses, (Status.OK, Status.REPEATED, Status.STALE))
        self._versions = np.where(taken, versions, self._versions)
        self._residuals = self._left_over(statuses, answer)
        return carried

    def send_again(self, pending: Pending) -> None:
        """Sends a push whose answer did not come, with its old number."""
        pending.push = self._client.start_push(
            pending.push.changes, pending.versions, pending.samples, pending.sequence
        )

    def _part(self, index: int, status: int, values: Any, sent: Any, weights: Any) -> Any:
        if status in (Status.OK, Status.REPEATED):
            new = self._rule.receive(weights, sent, values)
        elif status == Status.STALE:
            new = values + (weights - self.seen[index])
        else:
            return weights
        self.seen[index] = values
        return new

    def _left_over(self, statuses: Any, answer: Any) -> list[Any] | None:
        """What a compressing format did not carry, to be sent with the next message."""
        if self._client.wire_is_exact:
            return None
        return [
            residual if status == Status.OK else tf.zeros_like(residual)
            for status, residual in zip(statuses, answer.residuals, strict=True)
        ]


def connect(make: Any, wait_seconds: float) -> Any:
    """Calls `make` until the service is there.

    Args:
        make: opens a connection; raises `ConnectionError` if nobody answers.
        wait_seconds: how long to try.

    Raises:
        ConnectionError: if nobody answered in that time.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return make()
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def open_connection(
    participant: Any, client: int
) -> tuple[CenterClient, CenterClient | None, LedgerClient]:
    """Connects to weights, moving statistics and ledger of a service.

    Args:
        participant: the async worker.
        client: its number among the service's clients.
    """
    options, vectors = participant.options, participant.vectors
    address = participant.strategy.cluster_config.service_address()
    common = {
        "credential": participant.credential,
        "client": client,
        "timeout_seconds": options.timeout_seconds,
    }
    weights = CenterClient(
        ParameterClient(
            address,
            vectors.weights.partitions,
            wire=options.weights_wire,
            prefix=WEIGHTS_PREFIX,
            **common,
        ),
        participant.rule,
    )
    state = None
    if vectors.state is not None:
        client_of_state = ParameterClient(
            address, vectors.state.partitions, prefix=STATE_PREFIX, **common
        )
        state = CenterClient(client_of_state, participant.state_rule)
    return weights, state, LedgerClient(address, **common)


def _lost(statuses: Any) -> str:
    return (
        "The parameter service did not answer in time. Received: statuses "
        f"{statuses.tolist()} (-1: no answer). Its process may be gone; give "
        'on_service_loss="continue" to go on without it.'
    )
