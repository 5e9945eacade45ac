"""Epochs that are meant to be shorter than Keras expects."""

from __future__ import annotations

import contextlib
import warnings
from typing import ClassVar


# Keras assumes that all epochs have as many steps as its data has batches, or as the first epoch.
# Several callbacks may expect fewer at the same time, and end in any order.
class ShorterEpochs:
    """Suppression of Keras's warning that data ran out while at least one object expects that."""

    _expecting: ClassVar[list[ShorterEpochs]] = []
    _quiet = contextlib.ExitStack()

    def expect(self) -> None:
        """Expect shorter epochs from now on, until `end`; idempotent."""
        if self in self._expecting:
            return
        if not self._expecting:
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Your input ran out of data")
        self._expecting.append(self)

    def end(self) -> bool:
        """Restore the warnings; return whether shorter epochs were expected."""
        if self not in self._expecting:
            return False
        self._expecting.remove(self)
        if not self._expecting:
            self._quiet.close()
        return True
