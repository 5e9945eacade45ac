"""An async worker's next batch, asked for before it is needed."""

from __future__ import annotations

from typing import Any

from keras_het.asynchronous.parameter_service import Status
from keras_het.asynchronous.parameter_service.ledger_client import ServiceLostError


class EarlyClaim:
    """Asks for one batch ahead: a question that is waited for stands behind weights in the link.

    Args:
        ledger: hands out the batches.
    """

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger
        self._epoch = -1
        self._answer: Any = None
        self._is_of_lost_service = False

    def ask(self, epoch: int) -> None:
        """Asks for the next batch of an epoch, once, and does not wait."""
        if self._answer is None:
            self._epoch, self._answer = epoch, self._ledger.start_claim(epoch)

    def service_lost(self) -> None:
        """Takes note that the answer to what was asked may never come."""
        self._is_of_lost_service = self._answer is not None

    def take(self, epoch: int, after: int) -> tuple[Status, int, int]:
        """The batch that was asked for, or the next one.

        Args:
            epoch: whose batch it is to be.
            after: the latest batch that this worker has trained on, without a service perhaps.

        Returns:
            As `LedgerClient.claim` does.

        Raises:
            ServiceLostError: if there is no answer in time.
        """
        answer, self._answer = self._answer, None
        is_doubtful, self._is_of_lost_service = self._is_of_lost_service, False
        if answer is None or self._epoch != epoch:
            return self._claim(epoch)
        try:
            status, first, granted = self._ledger.claimed(answer)
        except ServiceLostError:
            if not is_doubtful:
                raise
            return self._claim(epoch)
        if status != Status.OK or (granted and first <= after):
            return self._claim(epoch)
        return status, first, granted

    def _claim(self, epoch: int) -> tuple[Status, int, int]:
        claimed: tuple[Status, int, int] = self._ledger.claim(epoch)
        return claimed
