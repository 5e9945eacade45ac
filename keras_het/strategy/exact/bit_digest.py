"""A few bytes that tell whether variables have the same bits, computed where they lie."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_PIECE = 2**18
_SMALL = 2**14
_OF_PIECES = 0x5851F42D4C957F2D
_BITS = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint32}


def digest(variables: Sequence[tf.Variable]) -> bytes:
    """Return what tells the bits of one device's variables; only few bytes leave the device."""
    # Different bits have it in common about once in 2^64 cases.
    if not variables:
        return b""
    with tf.device(variables[0].device):
        large: list[tf.Tensor] = []
        small: dict[tf.DType, list[tf.Tensor]] = {}
        for variable in variables:
            words = _words(variable.read_value())
            # a call for each of hundreds of small ones would take longer than all the rest
            is_large = words.shape[0] > _SMALL
            (large if is_large else small.setdefault(words.dtype, [])).append(words)
        parts = [*(tf.concat(group, 0) for group in small.values()), *large]
        return np.asarray(tf.stack([_function(each.dtype)(each) for each in parts])).tobytes()


def _words(value: tf.Tensor) -> tf.Tensor:
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.uint8)
    bits = _BITS[value.dtype.size]
    return tf.reshape(value if value.dtype == bits else tf.bitcast(value, bits), [-1])


@functools.cache
def _function(bits: tf.DType) -> tf.types.experimental.ConcreteFunction:
    r"""Return a function that adds up words, each times a factor of its place."""
    # sum_i f_i w_i mod 2^64, piece by piece: beside the variable it needs a few megabytes

    @tf.function(autograph=False)
    def digest_words(words: tf.Tensor) -> tf.Tensor:
        factors, size = tf.constant(_factors()), tf.size(words, tf.int64)

        def add(begin: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            piece = tf.cast(words[begin : begin + _PIECE], tf.int64)
            own = tf.reduce_sum(piece * factors[: tf.size(piece)])
            with tf.device("CPU:0"):
                following = begin + _PIECE
            return following, total * _OF_PIECES + own

        def is_left(begin: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            # Counted by the host: where a GPU counts, the host waits for it in each round.
            with tf.device("CPU:0"):
                return begin < size

        start = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
        return tf.while_loop(is_left, add, start)[1]

    with tf.init_scope():
        return digest_words.get_concrete_function(tf.TensorSpec([None], bits))


def _factors() -> np.ndarray:
    """Return odd numbers that look random, and are the same with every version of numpy."""
    mixed = np.arange(1, _PIECE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)).view(np.int64)
