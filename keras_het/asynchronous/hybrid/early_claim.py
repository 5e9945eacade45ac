"""An async worker's next batch, requested before it is needed."""

from __future__ import annotations

from typing import Any

from keras_het.asynchronous.parameter_service import Status
from keras_het.asynchronous.parameter_service.ledger_connection import (
    LedgerConnection,
    ServiceLostError,
)


class EarlyClaim:
    """A request for one batch ahead; a late request would queue behind weights on the link."""

    def __init__(self, ledger: LedgerConnection) -> None:
        self._ledger = ledger
        self._epoch = -1
        self._answer: Any = None
        self._is_of_lost_service = False

    def ask(self, epoch: int) -> None:
        """Ask for the next batch of an epoch, once, without waiting."""
        if self._answer is None:
            self._epoch, self._answer = epoch, self._ledger.start_claim(epoch)

    def service_lost(self) -> None:
        """Record that the answer to a pending question may never arrive."""
        self._is_of_lost_service = self._answer is not None

    def take(self, epoch: int, after: int) -> tuple[Status, int, int]:
        """Return the requested batch, or the next one."""
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
        return self._ledger.claim(epoch)
