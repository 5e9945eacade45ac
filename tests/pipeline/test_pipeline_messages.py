"""Tensors that come from another process have the sizes that layers need to know."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_het.strategy.pipeline.edges import Message, Messages, Spec


class Transport:
    """Knows how many dimensions a tensor has, but no size of them."""

    process = 1

    def receive(self, rank: int, dtype: tf.DType, source: int, number: int) -> tf.Tensor:
        value = tf.compat.v1.placeholder(dtype, [None] * rank)
        return value


class Edges:
    def messages(self, *_: Any) -> Any:
        for number, kind in enumerate(("tensor", "mask")):
            yield Message(kind, 3, 0, 1), 0, 1, number


def test_received_tensors_have_known_sizes() -> None:
    specs = {3: Spec(tf.float32, tf.TensorShape([None, 5, 8]), 2)}
    with tf.Graph().as_default():
        messages = Messages(Edges(), Transport(), specs, 0)
        ((_, value, mask),) = messages.receive(training=True, is_additive=True)
        assert value.shape.as_list() == [None, 5, 8]
        assert mask is not None and mask.shape.rank == 2
