"""Epochs that are meant to be shorter than Keras expects."""

from __future__ import annotations

import contextlib
import warnings
from typing import ClassVar


class ShorterEpochs:
    """Keeps Keras from warning that data ran out, as long as one object expects that.

    Keras takes the number of batches of its data, or the steps of the first epoch, for the steps of
    all epochs. Several callbacks may expect less at the same time, and end in any order.
    """

    _expecting: ClassVar[list[ShorterEpochs]] = []
    _quiet = contextlib.ExitStack()

    def expect(self) -> None:
        """From now on, until `end`; idempotent."""
        if self in self._expecting:
            return
        if not self._expecting:
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Your input ran out of data")
        self._expecting.append(self)

    def end(self) -> bool:
        """Leaves warnings as they were; whether shorter epochs were expected."""
        if self not in self._expecting:
            return False
        self._expecting.remove(self)
        if not self._expecting:
            self._quiet.close()
        return True
