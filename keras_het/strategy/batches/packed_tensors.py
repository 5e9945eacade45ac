"""Many small tensors in one long buffer per element type."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_het.value_types import Summand


class PackedTensors:
    """Packed dense tensors: one buffer moves faster than many tensors, and is one collective."""

    def __init__(self, tensors: Sequence[Summand]) -> None:
        self._tensors = [tf.convert_to_tensor(t) for t in tensors if _is_dense(t)]
        self._positions: dict[tf.DType, list[int]] = {}
        for position, tensor in enumerate(self._tensors):
            self._positions.setdefault(tensor.dtype, []).append(position)
        self.buffers = [
            _concatenate([self._tensors[p] for p in positions])
            for positions in self._positions.values()
        ]

    def unpack(self, buffers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Cut buffers of the same layout back into tensors."""
        result: list[tf.Tensor] = [None] * len(self._tensors)
        for buffer, positions in zip(buffers, self._positions.values(), strict=True):
            parts = [self._tensors[p] for p in positions]
            for position, value in zip(positions, _split(buffer, parts), strict=True):
                result[position] = value
        return result


def _is_dense(tensor: Summand) -> bool:
    return not isinstance(tensor, tf.IndexedSlices)


def _concatenate(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def _split(buffer: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    if len(like) == 1:
        return [buffer]
    parts = tf.split(buffer, [_size(tensor) for tensor in like])
    return [tf.reshape(part, _shape(tensor)) for part, tensor in zip(parts, like, strict=True)]


def _size(tensor: tf.Tensor) -> tf.Tensor | int:
    size = tensor.shape.num_elements()
    return tf.size(tensor) if size is None else size


def _shape(tensor: tf.Tensor) -> tf.TensorShape | tf.Tensor:
    return tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor)
