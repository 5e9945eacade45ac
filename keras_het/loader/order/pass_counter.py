"""Which pass over the data comes next, counted as tf.data counts iterators."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

Pass = bool | int
"""Whether a pass was iterated; the number of its steps if it was left before its end."""


class PassCounter:
    """Numbers the passes over one data set, or over all that read from one shuffle.

    A reshuffling `shuffle` has a new order for each iterator that is made, used or not, and Keras
    makes one at the end of each epoch that it does not use: on one device the epochs have the
    orders 0, 2, 4, ... To give the same orders, a pass is numbered when its iterator is made, and
    those that were never iterated are let go by before the next one starts.

    Data sets that read from one `shuffle` take its orders in turn on one device. Here each may have
    a copy of it, which has to let the passes of the others go by.

    Attributes:
        gone_by: for each pass that has started or was let go by, whether it was iterated.
        inputs: what takes passes.
        unfinished: numbers of the passes that were started and have not come to their end.
    """

    def __init__(self) -> None:
        self.gone_by: list[Pass] = []
        self.unfinished: set[int] = set()
        self.inputs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._reserved = 0
        self._places: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def reserve(self) -> int:
        """Numbers a pass whose iterator is being made."""
        self._reserved += 1
        return self._reserved - 1

    def give_back(self, number: int) -> None:
        """Takes a number back, if it is the latest, so that the next iterator gets it."""
        if self._reserved == number + 1:
            self._reserved = number

    def start(self, number: int) -> int:
        """Starts the pass `number`.

        Returns:
            Its number, which is the next one if a pass that was numbered later has started before
            it and its own order is gone.
        """
        self.gone_by += [False] * max(0, number - len(self.gone_by)) + [True]
        self._reserved = max(self._reserved, len(self.gone_by))
        self.unfinished.add(len(self.gone_by) - 1)
        return len(self.gone_by) - 1

    def catch_up(self, shuffle: Any, number: int) -> list[Pass]:
        """Brings a copy of the shuffle to the pass `number`, which starts now.

        Args:
            shuffle: the node that draws the orders.
            number: of the pass.

        Returns:
            The passes that have to be let go by on it before: those never iterated, and those of
            other copies.
        """
        place = self._places.get(shuffle, 0)
        self._places[shuffle] = max(place, number + 1)
        return self.gone_by[place:number]

    def is_at(self, shuffle: Any, number: int) -> None:
        """Takes note that the next pass of a copy of the shuffle is the one of this number."""
        self._places[shuffle] = number

    def finish(self, number: int) -> None:
        """Takes note that a pass has come to its end."""
        self.unfinished.discard(number)

    def leave(self, number: int, steps: int) -> None:
        """Takes note of how many steps of a pass were done that goes no further."""
        if number in self.unfinished and number < len(self.gone_by):
            self.gone_by[number] = steps

    def before(self, number: int | None) -> tuple[Pass, ...]:
        """The passes before one, or before the next iterator if it is None."""
        if number is not None:
            return tuple(self.gone_by[:number])
        return (*self.gone_by, *[False] * (self._reserved - len(self.gone_by)))

    def set_to(self, gone_by: Iterable[Pass]) -> None:
        """Makes the next pass the one after `gone_by`."""
        self.gone_by = list(gone_by)
        self.unfinished = set()
        self._reserved = len(self.gone_by)


_SECONDS_BEFORE = 0.5
_STEPS_BEFORE = 4


class PassEnd:
    """Counts the steps of a pass whose number of steps is known."""

    def __init__(self) -> None:
        self._left: int | None = None

    def begin(self, steps: int | None) -> None:
        """Starts a pass.

        Args:
            steps: its steps; None if they are not known, or no other pass follows.
        """
        self._left = steps

    def is_near(self, seconds: float, steps: int) -> bool:
        """Takes one execution; returns whether the pass ends within half a second.

        Args:
            seconds: its time.
            steps: its steps.
        """
        if self._left is None:
            return False
        self._left -= steps
        return self._left <= _STEPS_BEFORE or self._left * seconds <= _SECONDS_BEFORE * steps
