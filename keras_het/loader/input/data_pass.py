"""A pass over the data that can be rewound after a look at its first element."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable
from typing import TypeAlias

from keras_het.loader.nested import Batch
from keras_het.planning.bounded_shares import IntArray

Element: TypeAlias = tuple[list[Batch], IntArray]
"""Batches of the local replicas, and int64 sizes of shape [num_replicas]."""


class DataPass(abc.ABC):
    """A pass over the data."""

    def __init__(self, number: int, first_step: int, num_steps: int) -> None:
        self.number = number
        self.first_step = first_step
        self._num_steps = num_steps
        self.delivered = 0
        self.ended = False
        self.fingerprint: int | None = None
        self.on_end: Callable[[], None] | None = None
        self.was_executed = False
        self._first: Element | None = None
        self._rewound = False
        self._closed = False

    def next_element(self) -> Element:
        """Return the next batches of the local replicas and all sizes."""
        first, self._first = self._first, None
        if first is not None and self._rewound:
            return first
        if self.ended or self._closed:
            raise StopIteration
        try:
            element = self._produce()
        except StopIteration:
            self._end()
            raise
        self.delivered += 1
        if self.delivered == 1:
            self._first = element
        if self.first_step + self.delivered == self._num_steps:
            # Keras does not ask for the end of data whose size it knows
            self._end()
        return element

    def _end(self) -> None:
        self.ended = True
        if self.on_end is not None:
            self.on_end()
        self.close()

    def rewind(self) -> bool:
        """Return to the first element, once, if no other was delivered."""
        if self._rewound or self._first is None:
            return False
        self._rewound = True
        return True

    def leave_out(self, steps: int) -> None:
        """Continue as a pass that begins after some of its steps; before any is used."""
        with contextlib.suppress(StopIteration):
            for _ in range(steps):
                self.next_element()
        if steps:
            self.first_step, self.delivered = self.first_step + steps, 0
            self._first, self._rewound = None, False

    def cut_first_again(self) -> bool:
        """Cut the element that was looked at by the present weights; return whether possible."""
        return False

    @property
    def is_over(self) -> bool:
        """Whether the pass has ended, at the end of the data or before."""
        return self.ended or self._closed

    def close(self) -> None:
        """End the pass; prepared elements are dropped."""
        if not self._closed:
            self._closed = True
            self._free()

    @abc.abstractmethod
    def _produce(self) -> Element:
        """Make the next element, or raise StopIteration."""

    @abc.abstractmethod
    def _free(self) -> None:
        """Release the resources of the pass; called once."""
