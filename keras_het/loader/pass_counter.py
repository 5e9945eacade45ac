"""Which pass over the data comes next, counted as tf.data counts iterators."""

from __future__ import annotations


class PassCounter:
    """Numbers the passes over one data set.

    A reshuffling `shuffle` has a new order for each iterator that is made, used or not, and Keras
    makes one at the end of each epoch that it does not use: on one device the epochs have the
    orders 0, 2, 4, ... To give the same orders, a pass is numbered when its iterator is made, and
    those that were never iterated are let go by before the next one starts.

    Attributes:
        gone_by: for each pass that has started or was let go by, whether it was iterated.
        unfinished: numbers of the passes that were started and have not come to their end.
    """

    def __init__(self) -> None:
        self.gone_by: list[bool] = []
        self.unfinished: set[int] = set()
        self._reserved = 0

    def reserve(self) -> int:
        """Numbers a pass whose iterator is being made."""
        self._reserved += 1
        return self._reserved - 1

    def give_back(self, number: int) -> None:
        """Takes a number back, if it is the latest, so that the next iterator gets it."""
        if self._reserved == number + 1:
            self._reserved = number

    def start(self, number: int) -> tuple[int, int]:
        """Starts the pass `number`.

        Returns:
            Its number, which is the next one if a pass that was numbered later has started before
            it and its own order is gone; and how many passes were never iterated and have to be let
            go by before it.
        """
        unused = max(0, number - len(self.gone_by))
        self.gone_by += [False] * unused + [True]
        self._reserved = max(self._reserved, len(self.gone_by))
        self.unfinished.add(len(self.gone_by) - 1)
        return len(self.gone_by) - 1, unused

    def finish(self, number: int) -> None:
        """Takes note that a pass has come to its end."""
        self.unfinished.discard(number)

    def before(self, number: int | None) -> tuple[bool, ...]:
        """The passes before one, or before the next iterator if it is None."""
        if number is not None:
            return tuple(self.gone_by[:number])
        return (*self.gone_by, *[False] * (self._reserved - len(self.gone_by)))

    def set_to(self, gone_by: tuple[bool, ...]) -> None:
        """Makes the next pass the one after `gone_by`."""
        self.gone_by = list(gone_by)
        self.unfinished = set()
        self._reserved = len(gone_by)
