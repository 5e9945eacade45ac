r"""A batch in M consecutive parts, and how much each counts.

Micro-batch m has the rows from :math:`\lfloor Bm/M \rfloor` to :math:`\lfloor B(m+1)/M \rfloor`,
and its weight is its part of all B rows. A batch of fewer rows than micro-batches fills up with
rows that count nothing, because a layer need not accept an empty batch.
"""

from __future__ import annotations

import tensorflow as tf

from keras_het.loader.order.rows import count_rows, slice_rows
from keras_het.value_types import Nest


class MicroBatches:
    """The parts of one batch, in the graph."""

    def __init__(self, batch: Nest, count: int) -> None:
        self.count = count
        self.rows = tf.cast(count_rows(batch), tf.int32)
        self._bounds = [self.rows * m // count for m in range(count + 1)]

    def part(self, number: int, of: Nest) -> Nest:
        """Return the rows of a micro-batch, at least one."""
        begin = self._bounds[number]
        end = tf.maximum(self._bounds[number + 1], begin + 1)
        return slice_rows(of, begin, end - begin)

    def counted(self, number: int, of: Nest) -> Nest:
        """Return those rows of a micro-batch's results that belong to the batch."""
        size = self._bounds[number + 1] - self._bounds[number]
        return tf.nest.map_structure(lambda value: value[:size], of)

    def filled_up(self, number: int, of: tf.Tensor) -> tf.Tensor:
        """Undo `counted` for a gradient: rows that count nothing get zeros."""
        size = self._bounds[number + 1] - self._bounds[number]
        missing = tf.maximum(1 - size, 0)
        return tf.concat([of, tf.zeros(tf.concat([[missing], tf.shape(of)[1:]], 0), of.dtype)], 0)

    def offset(self, number: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the first row of a micro-batch and the row after its last one that counts."""
        return self._bounds[number], self._bounds[number + 1]

    def sizes(self) -> tf.Tensor:
        bounds = tf.stack(self._bounds)
        return bounds[1:] - bounds[:-1]

    def weight(self, number: int) -> tf.Tensor:
        """Return the micro-batch's part of the batch's rows, float64 scalar."""
        size = self._bounds[number + 1] - self._bounds[number]
        return tf.cast(size, tf.float64) / tf.cast(self.rows, tf.float64)
