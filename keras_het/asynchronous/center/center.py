"""The parameter service as the task that leads it uses it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_het.asynchronous.parameter_service.sample_ledger import Stage

_DIGIT = 1 << 20


@dataclasses.dataclass(frozen=True)
class Grant:
    """Global batches of an epoch that were handed out.

    Args:
        first: the first of them.
        count: how many, 0 for none.
        is_last: whether the epoch has no batch after them for this participant.
    """

    first: int
    count: int
    is_last: bool

    def to_numbers(self) -> tuple[int, ...]:
        """The grant as numbers that float32 has, for a collective of those; each below 2**24."""
        return *divmod(self.first, _DIGIT), self.count, int(self.is_last)

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> Grant:
        """The grant of `to_numbers`.

        Args:
            numbers: four whole ones.
        """
        digit, rest, count, is_last = (int(number) for number in numbers)
        return cls(digit * _DIGIT + rest, count, bool(is_last))


class Center(abc.ABC):
    """The service in the leader's own memory, or its way to other processes that hold it.

    Attributes:
        ledger: the sample ledger.
    """

    ledger: Any

    @abc.abstractmethod
    def start_epoch(self, epoch: int) -> None:
        """Begins an epoch, and with the first one lets async workers in.

        Args:
            epoch: its number, from 0.
        """

    @abc.abstractmethod
    def set_stage(self, stage: Stage) -> None:
        """Tells all async workers how far training is.

        Args:
            stage: how far.
        """

    @abc.abstractmethod
    def exchange(
        self, weights: list[Any], state: list[Any], samples: int, push: bool, wait: bool = False
    ) -> list[Any]:
        """Exchanges the group's weights and moving statistics with the center.

        Args:
            weights: the group's weights, a vector for each partition; to push with rules that
                send gradients, the mean gradient.
            state: its moving statistics, likewise.
            samples: samples behind the change.
            push: whether to push weights.
            wait: whether to wait for an answer that travels.

        Returns:
            The group's weights and moving statistics to go on with.
        """

    @abc.abstractmethod
    def claim(self, epoch: int, count: int) -> Grant:
        """Takes batches of an epoch for the group.

        Args:
            epoch: its number.
            count: how many at most, from 1.
        """

    @abc.abstractmethod
    def add_used(self, samples: int) -> None:
        """Counts samples that the group has used.

        Args:
            samples: how many, since the last call.
        """

    @abc.abstractmethod
    def pace(self, pace: Sequence[float]) -> tuple[Any, Any] | None:
        """Says how fast the group is, and tells how fast all are.

        Args:
            pace: as in `SampleLedger.pace`.

        Returns:
            Paces and silence of all clients; None without a service.
        """

    @abc.abstractmethod
    def weights(self) -> list[Any]:
        """The center, a vector for each partition."""

    @abc.abstractmethod
    def state(self) -> list[Any]:
        """The center of the moving statistics, likewise."""

    @abc.abstractmethod
    def versions(self) -> Any:
        """Updates of each partition of the weights so far."""

    @abc.abstractmethod
    def training_clients(self) -> list[int]:
        """Async workers that train."""

    @abc.abstractmethod
    def waiting_clients(self) -> list[int]:
        """Async workers that have ended and wait for the final weights."""

    @abc.abstractmethod
    def skip(self, client: int) -> bool:
        """Lets nobody wait for a client that is gone.

        Args:
            client: its number.

        Returns:
            Whether all of the service knows; if not, say it again.
        """

    @abc.abstractmethod
    def conclude(self) -> None:
        """Keeps versions and counts readable after the service's end."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the service."""
