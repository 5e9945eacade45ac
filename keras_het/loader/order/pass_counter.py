"""Number of the next pass over the data, counted as tf.data counts iterators."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

Pass = bool | int
"""Whether a pass was iterated; the number of its steps if it was left before its end."""


class PassCounter:
    """Counter of the passes over one dataset, or over all that read from one shuffle.

    A reshuffling `shuffle` has a new order for each iterator that is made, used or not, and Keras
    makes one at the end of each epoch that it does not use: on one device the epochs have the
    orders 0, 2, 4, ... To produce the same orders, a pass is numbered when its iterator is made,
    and those that were never iterated are skipped before the next one starts.

    Datasets that read from one `shuffle` take its orders in turn on one device. Here each may have
    a copy of it, which has to skip the passes of the others.
    """

    def __init__(self) -> None:
        self.gone_by: list[Pass] = []
        self.unfinished: set[int] = set()
        self._reserved = 0
        self._places: weakref.WeakKeyDictionary[tf.data.Dataset, int] = weakref.WeakKeyDictionary()

    def reserve(self) -> int:
        self._reserved += 1
        return self._reserved - 1

    def give_back(self, number: int) -> None:
        """Take back a number, if it is the latest, so that the next iterator gets it."""
        if self._reserved == number + 1:
            self._reserved = number

    def start(self, number: int) -> int:
        self.gone_by += [False] * max(0, number - len(self.gone_by)) + [True]
        self._reserved = max(self._reserved, len(self.gone_by))
        self.unfinished.add(len(self.gone_by) - 1)
        return len(self.gone_by) - 1

    def catch_up(self, shuffle: tf.data.Dataset, number: int) -> list[Pass]:
        """Bring a copy of the shuffle to the pass `number`, which starts now."""
        place = self._places.get(shuffle, 0)
        self._places[shuffle] = max(place, number + 1)
        return self.gone_by[place:number]

    def is_at(self, shuffle: tf.data.Dataset, number: int) -> None:
        """Record that the next pass of a copy of the shuffle is the one with this number."""
        self._places[shuffle] = number

    def finish(self, number: int) -> None:
        self.unfinished.discard(number)

    def leave(self, number: int, steps: int) -> None:
        """Record the number of steps done in a pass that is abandoned."""
        if number in self.unfinished and number < len(self.gone_by):
            self.gone_by[number] = steps

    def before(self, number: int | None) -> tuple[Pass, ...]:
        """Return the passes before one, or before the next iterator if it is None."""
        if number is not None:
            return tuple(self.gone_by[:number])
        return (*self.gone_by, *[False] * (self._reserved - len(self.gone_by)))

    def set_to(self, gone_by: Iterable[Pass]) -> None:
        self.gone_by = list(gone_by)
        self.unfinished = set()
        self._reserved = len(self.gone_by)


_SECONDS_BEFORE = 0.5
_STEPS_BEFORE = 4


class PassEnd:
    """Step counter of a pass whose number of steps is known."""

    def __init__(self) -> None:
        self._left: int | None = None

    def begin(self, steps: int | None) -> None:
        self._left = steps

    def is_near(self, seconds: float, steps: int) -> bool:
        """Count one execution; return whether the pass ends within half a second."""
        if self._left is None:
            return False
        self._left -= steps
        return self._left <= _STEPS_BEFORE or self._left * seconds <= _SECONDS_BEFORE * steps
