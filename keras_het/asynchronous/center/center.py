"""Interface of the parameter service for the task that leads it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_het.asynchronous.parameter_service.sample_ledger import Stage

_DIGIT = 1 << 20


@dataclasses.dataclass(frozen=True)
class Grant:
    """Global batches of an epoch handed out to a participant.

    Args:
        first: the first batch.
        count: the number of batches, 0 for none.
        is_last: whether the epoch has no further batch for this participant.
    """

    first: int
    count: int
    is_last: bool

    def to_numbers(self) -> tuple[int, ...]:
        """Encode the grant as float32 numbers for a collective; each below 2**24."""
        return *divmod(self.first, _DIGIT), self.count, int(self.is_last)

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> Grant:
        """Restore the grant from the result of `to_numbers`.

        Args:
            numbers: four whole numbers.
        """
        digit, rest, count, is_last = (int(number) for number in numbers)
        return cls(digit * _DIGIT + rest, count, bool(is_last))


class Center(abc.ABC):
    """The service in the leader's own memory, or its connection to processes that hold it.

    Attributes:
        ledger: the sample ledger.
    """

    ledger: Any

    @abc.abstractmethod
    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch; the first one also admits async workers.

        Args:
            epoch: the epoch's number, from 0.
        """

    @abc.abstractmethod
    def set_stage(self, stage: Stage) -> None:
        """Announce the stage of training to all async workers.

        Args:
            stage: the stage.
        """

    @abc.abstractmethod
    def exchange(
        self, weights: list[Any], state: list[Any], samples: int, push: bool, wait: bool = False
    ) -> list[Any]:
        """Exchange the group's weights and moving statistics with the center.

        Args:
            weights: the group's weights, a vector for each partition; the mean gradient for pushes
                of rules that send gradients.
            state: the group's moving statistics, in the same form.
            samples: number of samples behind the change.
            push: whether to push weights.
            wait: whether to wait for an answer in flight.

        Returns:
            The group's weights and moving statistics from which to continue.
        """

    @abc.abstractmethod
    def claim(self, epoch: int, count: int) -> Grant:
        """Claim batches of an epoch for the group.

        Args:
            epoch: the epoch's number.
            count: largest number of batches, from 1.
        """

    @abc.abstractmethod
    def add_used(self, samples: int) -> None:
        """Count samples that the group has used.

        Args:
            samples: number of samples since the last call.
        """

    @abc.abstractmethod
    def pace(self, pace: Sequence[float]) -> tuple[Any, Any] | None:
        """Report the group's pace and return the pace of all clients.

        Args:
            pace: as in `SampleLedger.pace`.

        Returns:
            Paces and silence of all clients; None without a service.
        """

    @abc.abstractmethod
    def weights(self) -> list[Any]:
        """The center, one vector for each partition."""

    @abc.abstractmethod
    def state(self) -> list[Any]:
        """The center of the moving statistics, in the same form."""

    @abc.abstractmethod
    def versions(self) -> Any:
        """Number of updates of each partition of the weights."""

    @abc.abstractmethod
    def training_clients(self) -> list[int]:
        """Async workers that are training."""

    @abc.abstractmethod
    def waiting_clients(self) -> list[int]:
        """Async workers that have finished and wait for the final weights."""

    @abc.abstractmethod
    def skip(self, client: int) -> bool:
        """Stop all waiting for a client that is gone.

        Args:
            client: the client's number.

        Returns:
            Whether the entire service knows; if not, repeat the call.
        """

    @abc.abstractmethod
    def conclude(self) -> None:
        """Keep versions and counts readable after the end of the service."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the service."""
